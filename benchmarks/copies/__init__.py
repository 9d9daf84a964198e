"""Measure copies between KV blocks and packed memory on the CPU: the kernel in C, numpy, and memcpy."""
