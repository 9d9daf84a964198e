"""Names of images, videos and audio in prompts: digests of the processor's output.

vLLM's own identifiers of these items do not identify their content. A client may choose an identifier.
Without prefix cache and processor cache, identifiers are a counter that restarts with the engine. Otherwise,
they are digests of the media, which do not depend on the processor's settings but do depend on the model's
path. KV depends only on what the processor gives to the model: resized and normalised pixels, grids, lengths.
So kvferry names items by a digest of the processor's output.

vLLM caches what it computes of an item under the item's identifier. So a name is reliable only if vLLM has
not seen other content under the same identifier (`identifiers`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from blake3 import blake3

from kvferry.engines.vllm.compat.multimodal import item_data
from kvferry.errors import Unnameable

_MEMORY = "kvferry_name"
_IDENTIFIED = "kvferry_identified"


@dataclass(slots=True)
class Identified:
    """A record shared by all images (or other multimodal items) with the same identifier in vLLM.

    Attributes:
        name: digest of the items' content. Empty if two items had different content, or if no digest of the
            first item could be computed.
    """

    name: str


def identify(feature: Any, identified: Identified) -> None:
    """Attach the record of an item's identifier to the item, where `is_uncertain` finds it.

    Mutates `feature.data`.

    Args:
        feature: vLLM's MultiModalFeatureSpec of the item.
        identified: record of the identifier, which all items with this identifier share.
    """
    setattr(feature.data, _IDENTIFIED, identified)


def is_uncertain(feature: Any) -> bool:
    """Return True if an item with other content has, or may have, used the same identifier as this item.

    vLLM caches its results for an item under the item's identifier. So the KV of an uncertain item may come
    from other content, and must not be reused.

    Args:
        feature: vLLM's MultiModalFeatureSpec of the item.
    """
    identified: Identified | None = getattr(feature.data, _IDENTIFIED, None)
    return identified is not None and not identified.name


def name_of(feature: Any) -> str:
    """Return the name of an image or other item of a prompt: a digest of its content, 32 hex digits.

    The name is cached in `feature.data`, which vLLM keeps for later requests.

    Args:
        feature: vLLM's MultiModalFeatureSpec of the item.

    Raises:
        Unnameable: the scheduler does not have the output of vLLM's multimodal processor, or no digest can be
            computed from that output. Also raised if the item's identifier was, or may have been, used for
            other content before.
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
            digest.update(len(part).to_bytes(8, "little"))
            digest.update(part)
    except (TypeError, ValueError, RuntimeError) as error:  # clients may send items of any shape
        raise Unnameable(f"no digest can be made of the {feature.modality}: {error}") from error
    name = str(digest.hexdigest(length=16))
    setattr(feature.data, _MEMORY, name)
    return name


def _parts(value: Any, where: str) -> Iterator[bytes | memoryview]:
    """Yield the content of a value as byte strings to hash. Different values yield different byte strings.

    Args:
        value: tensor, array, plain value, or mapping or list of such values.
        where: name of the value, for the error message.

    Raises:
        Unnameable: a part of the value has a type that cannot be hashed.
    """
    if isinstance(value, Mapping):
        yield b"mapping %d" % len(value)
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
    elif isinstance(value, np.ndarray) and value.dtype != object:
        yield f"array {value.dtype.str} {value.shape}".encode()
        yield np.ascontiguousarray(value).tobytes()
    elif value is None or isinstance(value, bool | int | float | str):
        yield f"{type(value).__name__} {value!r}".encode("utf-8", "surrogatepass")
    else:
        raise Unnameable(f"{where} is a {type(value).__name__}, of which no digest is made")
