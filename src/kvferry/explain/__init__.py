"""What `kvferry explain` says: engines of this machine are asked for what they remember of requests."""
