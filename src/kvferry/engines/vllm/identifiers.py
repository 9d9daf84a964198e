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
from kvferry.errors import Unnameable

MAX_IDENTIFIERS: Final = 65_536
"""Number of identifiers to remember: the most recently used ones. vLLM's caches hold fewer items."""


class Identifiers:
    """Table of the identifiers of images and other items, which detects identifiers that are reused.

    An identifier is reused if it comes with different content. Only the engine's thread may use the table.
    """

    def __init__(self, max_identifiers: int = MAX_IDENTIFIERS) -> None:
        """Create an empty table of identifiers.

        Args:
            max_identifiers: maximum number of identifiers in the table. The least recently
                used ones are removed first.
        """
        self._max_identifiers = max_identifiers
        self._identified: OrderedDict[bytes, items.Identified] = OrderedDict()

    def __len__(self) -> int:
        """Return the number of identifiers in the table."""
        return len(self._identified)

    def note(self, request: Any) -> None:
        """Record the images and other items of a new request, and detect identifiers that are reused.

        Each item gets a record that it shares with all items of the same identifier (`items.identify`). The
        record holds the name of the first item's content. If the content of a later item differs, the record
        is marked as uncertain, and kvferry no longer trusts the name of any item that shares the record.

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
        if name:
            if name != identified.name:
                identified.name = ""
            items.identify(feature, identified)
        self._identified.move_to_end(key)
        if len(self._identified) > self._max_identifiers:
            self._identified.popitem(last=False)
