"""Names of images, videos and audio in prompts: digests of the processor's output.

KV depends only on what the processor gives to the model: resized and normalised pixels, grids, lengths. No
identifier of vLLM's is a name of that: it may be chosen by a client (``uuid``), a counter that restarts with
the engine, or a digest of the media that depends on the model's path but not on the processor's settings.

vLLM caches an item's encoder output, and the blocks of prompts with the item, under its identifier. If two
images have the same one, vLLM may compute a prompt from the encoder output of the other image. So when
kvferry sees a second image with an identifier (`Identifiers`), it does not offer, store or look up KV of
prompts with either image any more.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, Final

import numpy as np
import torch
from blake3 import blake3

from kvferry.common.errors import Unnameable
from kvferry.engines.vllm.compat.model import item_data

_MEMORY = "kvferry_name"
_IDENTIFIED = "kvferry_identified"

MAX_IDENTIFIERS: Final = 65_536
"""Number of identifiers to remember: the most recently used ones. vLLM's caches hold fewer items."""


@dataclass(slots=True)
class _Identified:
    """A record shared by all items with the same identifier in vLLM."""

    name: str  # empty if two items had different content, or if the first one could not be digested


class Identifiers:
    """Detects whether different items have the same identifier. Only the engine's thread may use it."""

    def __init__(self, max_identifiers: int = MAX_IDENTIFIERS) -> None:
        self._max_identifiers = max_identifiers
        self._identified: OrderedDict[bytes, _Identified] = OrderedDict()

    def __len__(self) -> int:
        return len(self._identified)

    def note(self, request: Any) -> None:
        """Record the identifiers of the items in one of vLLM's requests. Mutates the data of the items."""
        for feature in request.mm_features or ():
            self._note(feature)

    def _note(self, feature: Any) -> None:
        # Clients choose identifiers, so they may have any length.
        key = blake2b(str(feature.identifier).encode("utf-8", "surrogatepass"), digest_size=16).digest()
        try:
            name = name_of(feature)
        except Unnameable:
            name = ""
        identified = self._identified.setdefault(key, _Identified(name))
        # Without data, vLLM uses what it keeps under the identifier. Data without a digest may be anything.
        if name or item_data(feature) is not None:
            if name != identified.name:
                identified.name = ""
            # On the data, which vLLM's processor cache keeps for later requests with the same item.
            setattr(feature.data, _IDENTIFIED, identified)
        self._identified.move_to_end(key)
        if len(self._identified) > self._max_identifiers:
            self._identified.popitem(last=False)


def is_uncertain(feature: Any) -> bool:
    """Return True if an item with other content has, or may have, used the same identifier."""
    identified: _Identified | None = getattr(feature.data, _IDENTIFIED, None)
    return identified is not None and not identified.name


def name_of(feature: Any) -> str:
    """Return the name of an item (vLLM's MultiModalFeatureSpec): 32 hex digits, cached in `feature.data`.

    Raises:
        Unnameable: the scheduler does not have the output of vLLM's multimodal processor, no digest can be
            computed from it, or the item is uncertain.
    """
    if is_uncertain(feature):
        raise Unnameable(
            f"another {feature.modality} has come under the same identifier (uuid), and vLLM keeps what it "
            "computes of both under that; let clients leave uuid out, or give each its own"
        )
    remembered: str | None = getattr(feature.data, _MEMORY, None)
    if remembered is not None:
        return remembered
    data = item_data(feature)
    if data is None:
        raise Unnameable(
            f"what the processor made of the {feature.modality} is not in the scheduler's process (with "
            "mm_processor_cache_type shm it never is; lru, the default, keeps it there)"
        )
    digest = blake3(max_threads=blake3.AUTO)
    try:
        for part in _parts({"modality": str(feature.modality), "data": data}, "item"):
            # The length keeps parts apart: otherwise, two splits of the same bytes would have one digest.
            digest.update(len(part).to_bytes(8, "little"))
            digest.update(part)
    except (TypeError, ValueError, RuntimeError) as error:  # clients may send items of any shape
        raise Unnameable(f"no digest can be made of the {feature.modality}: {error}") from error
    name = str(digest.hexdigest(length=16))
    setattr(feature.data, _MEMORY, name)
    return name


def _parts(value: Any, where: str) -> Iterator[bytes | memoryview]:
    """Yield the content of a value as byte strings to hash, different ones for different values."""
    if isinstance(value, Mapping):
        yield b"mapping %d" % len(value)
        # Two requests may have the same mapping in different orders.
        for key in sorted(value):
            yield str(key).encode()
            yield from _parts(value[key], f"{where}.{key}")
    elif isinstance(value, list | tuple):
        yield b"list %d" % len(value)
        for each in value:
            yield from _parts(each, where)
    elif isinstance(value, torch.Tensor):
        array = value.detach().cpu().contiguous()
        yield f"tensor {array.dtype} {tuple(array.shape)}".encode()
        yield memoryview(array.reshape(-1).view(torch.uint8).numpy())
    # An array of objects holds addresses.
    elif isinstance(value, np.ndarray) and value.dtype != object:
        yield f"array {value.dtype.str} {value.shape}".encode()
        yield np.ascontiguousarray(value).tobytes()
    elif value is None or isinstance(value, bool | int | float | str):
        yield f"{type(value).__name__} {value!r}".encode("utf-8", "surrogatepass")
    else:
        raise Unnameable(f"{where} is a {type(value).__name__}, of which no digest is made")
