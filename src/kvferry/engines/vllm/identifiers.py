"""Detection of identifiers that stand for more than one image, video or piece of audio.

vLLM caches an item's encoder output, and the blocks of prompts that contain the item, under the item's
identifier. A client may choose the identifier (``uuid``), so two images can have the same identifier. vLLM
may then compute a prompt from the cached encoder output of the other image. The resulting KV does not belong
to the image in the request. When kvferry sees a second image with an identifier, it stops trusting the names
of both images. From then on, it does not offer, store or look up KV of prompts with either image.
"""

from __future__ import annotations

from collections import OrderedDict
from hashlib import blake2b
from typing import Any, Final

from kvferry.engines.vllm import items
from kvferry.engines.vllm.compat.multimodal import item_data
from kvferry.errors import Unnameable

MAX_IDENTIFIERS: Final = 65_536
"""Number of identifiers to remember: the most recently used ones. vLLM's caches hold fewer items."""


class Identifiers:
    """Table that detects whether two different images (or other items) of prompts have the same identifier.

    Clients may choose the identifiers, and vLLM caches the encoder's output under them. Only the engine's
    thread may use the table.
    """

    def __init__(self, max_identifiers: int = MAX_IDENTIFIERS) -> None:
        """Create an empty table of identifiers.

        Args:
            max_identifiers: maximum number of identifiers in the table. If there are more, the least recently
                used one is removed.
        """
        self._max_identifiers = max_identifiers
        self._identified: OrderedDict[bytes, items.Identified] = OrderedDict()

    def __len__(self) -> int:
        """Return the number of identifiers in the table."""
        return len(self._identified)

    def note(self, request: Any) -> None:
        """Record the identifiers of a new request's images and other items, and detect reused identifiers.

        An identifier is reused if items with different content have it. All items with the same identifier
        share a record, which holds a digest of the first item's content. If a later item has another digest,
        or no digest can be made of its content, the digest in the record is cleared. This marks all of these
        items as uncertain (`items.is_uncertain`).

        Args:
            request: vLLM's request.
        """
        for feature in request.mm_features or ():
            self._note(feature)

    def _note(self, feature: Any) -> None:
        # Clients choose identifiers, so they may have any length.
        key = blake2b(str(feature.identifier).encode("utf-8", "surrogatepass"), digest_size=16).digest()
        try:
            name = items.name_of(feature)
        except Unnameable:
            name = ""
        identified = self._identified.setdefault(key, items.Identified(name))
        # Without data, vLLM uses what it keeps under the identifier. Data without a digest may be anything.
        if name or item_data(feature) is not None:
            if name != identified.name:
                identified.name = ""
            items.identify(feature, identified)
        self._identified.move_to_end(key)
        if len(self._identified) > self._max_identifiers:
            self._identified.popitem(last=False)
