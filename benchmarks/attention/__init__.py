"""Measure whether a cross-layer KV cache slows attention down, and what it gains in a hand-over."""
