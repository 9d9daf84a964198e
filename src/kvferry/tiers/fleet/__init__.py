"""The fleet tier: chunks in the host memory of other engines."""
