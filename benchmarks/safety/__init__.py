"""Measure the time that protections cost: lease checks, verified transfers, checksums and encryption."""
