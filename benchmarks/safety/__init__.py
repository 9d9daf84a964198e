"""Measure the time that protections cost: lease checks, checksums and encryption."""
