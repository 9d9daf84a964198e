"""The host tier, which keeps chunks in host memory that the ranks of a node share."""
