"""The tiered KV cache of one engine: host memory in front of storage. `chunk_cache` is the entry point."""
