"""Tiers: where chunks are kept. Their bytes do not depend on the engine that wrote them.

`host` keeps chunks in memory that the ranks of a node share, `files` in a directory, `objects` in object
storage. The last two implement the protocol in `storage_tier`, and several processes can share them.
"""

from kvferry.common.lazy import lazy_names

__getattr__ = lazy_names(__name__, __file__)
