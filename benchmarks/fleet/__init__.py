"""Chunks in the host memory of other engines: how fast they are read, and found in a directory."""
