"""Memory of KV caches: allocated caches, guarded views, strided copies, huge pages, sealed files."""
