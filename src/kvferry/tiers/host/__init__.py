"""The host tier: chunks in memory that the ranks of a node share."""
