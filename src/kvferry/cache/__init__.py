"""The tiered KV cache of one engine: host memory in front of storage. `chunk_cache` is the entry point."""

from kvferry.common.lazy import lazy_names

__getattr__ = lazy_names(__name__, __file__)
