"""What a request and a new peer cost the decode side, besides moving bytes."""
