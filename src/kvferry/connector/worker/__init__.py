"""The connector on each rank: loads under way, copies between blocks and host memory, and their orders."""
