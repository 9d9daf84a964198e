"""Memory as tensors: allocated caches, guarded views, strided copies, huge pages, sealed files."""
