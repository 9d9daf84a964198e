"""Start engines together, with a router in front of them."""
