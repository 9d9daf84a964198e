"""Memory as tensors: caches in memory of our own, guarded views, strided copies, huge pages, sealed files."""
