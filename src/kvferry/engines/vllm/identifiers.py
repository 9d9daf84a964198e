"""Content of the identifiers under which vLLM keeps images, videos and audio.

vLLM keeps an item's encoder output, and the blocks of prompts with it, under the item's identifier. A client
may choose the identifier (``uuid``), so two images can come with one. vLLM then computes one of them from
the cached output of the other, and the KV is not that of the image in the request. From the second image on,
neither has a certain name: its KV is not offered, not stored and not looked for.
"""

from __future__ import annotations

from collections import OrderedDict
from hashlib import blake2b
from typing import Any, Final

from kvferry.engines.vllm import items
from kvferry.errors import Unnameable

MOST: Final = 65_536
"""Identifiers that are remembered, the last ones used; vLLM keeps encoder outputs and blocks of fewer."""


class Identifiers:
    """Contents by identifier. Only the engine's thread calls it, with every new request."""

    def __init__(self, most: int = MOST) -> None:
        """Begin empty; remember up to `most` identifiers."""
        self._most = most
        self._known: OrderedDict[bytes, items.Identified] = OrderedDict()

    def __len__(self) -> int:
        """Return the number of remembered identifiers."""
        return len(self._known)

    def note(self, request: Any) -> None:
        """Note a new request's items, whose identifiers may stand for other content than before."""
        for feature in request.mm_features or ():
            self._note(feature)

    def _note(self, feature: Any) -> None:
        # Chosen by clients, so of any length.
        key = blake2b(str(feature.identifier).encode("utf-8", "surrogatepass"), digest_size=16).digest()
        try:
            name = items.name_of(feature)
        except Unnameable:
            name = ""
        known = self._known.setdefault(key, items.Identified(name))
        if name:
            if name != known.name:
                known.name = ""
            items.identify(feature, known)
        self._known.move_to_end(key)
        if len(self._known) > self._most:
            self._known.popitem(last=False)
