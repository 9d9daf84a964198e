"""Memory of KV caches: guarded views, strided copies, huge pages, sealed files."""
