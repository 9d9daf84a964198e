"""Memory of KV caches: guarded views, strided copies, huge pages, sealed files."""

from kvferry.common.lazy import lazy_names

__getattr__ = lazy_names(__name__, __file__)
