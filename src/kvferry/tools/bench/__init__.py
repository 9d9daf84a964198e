"""`kvferry bench`: measure transfers and tiers."""
