"""Detection of identifiers that stand for more than one image, video or piece of audio.

vLLM keeps an item's encoder output, and the blocks of prompts that contain the item, under the item's
identifier. A client may choose the identifier (``uuid``), so two images can come under one identifier. vLLM
then computes one prompt from the cached encoder output of the other image, and its KV is not that of the
image in the request. As soon as a second image comes under an identifier, neither image has a reliable name.
From then on, kvferry does not offer, store or look up KV of prompts with either of them.
"""

from __future__ import annotations

from collections import OrderedDict
from hashlib import blake2b
from typing import Any, Final

from kvferry.engines.vllm import items
from kvferry.errors import Unnameable

MOST: Final = 65_536
"""Number of identifiers to remember, the most recently used ones. vLLM keeps outputs and blocks of fewer."""


class Identifiers:
    """The content behind each identifier. Only the engine's thread calls it, with every new request."""

    def __init__(self, most: int = MOST) -> None:
        """Create an empty table that remembers up to `most` identifiers."""
        self._most = most
        self._known: OrderedDict[bytes, items.Identified] = OrderedDict()

    def __len__(self) -> int:
        """Return the number of remembered identifiers."""
        return len(self._known)

    def note(self, request: Any) -> None:
        """Record the items of a new request, and detect identifiers that stood for other content before."""
        for feature in request.mm_features or ():
            self._note(feature)

    def _note(self, feature: Any) -> None:
        # Clients choose identifiers, so they may have any length.
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
