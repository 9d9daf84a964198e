"""Names of images, videos and audio in prompts: digests of what the processor made of them.

vLLM's own identifiers cannot serve. They may be a client's word, a counter that starts anew with the engine
(without prefix caching and processor cache), or a digest of such a thing; and a digest of the media says
nothing of the processor, but includes the path of the model. What the model is given decides what it
computes: pixels as they were resized and normalised, grids, lengths.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from blake3 import blake3

from kvferry.engines.vllm.compat.multimodal import item_data
from kvferry.errors import Unnameable

_MEMORY = "kvferry_name"


def name_of(feature: Any) -> str:
    """The name of an item of a prompt; 32 hex digits.

    vLLM keeps what it has processed for further requests; it is digested once.

    Args:
        feature: vLLM's MultiModalFeatureSpec.

    Raises:
        Unnameable: the scheduler does not have what the model is given.
    """
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
    for part in _parts({"modality": str(feature.modality), "data": data}, "item"):
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    name = str(digest.hexdigest(length=16))
    setattr(feature.data, _MEMORY, name)
    return name


def _parts(value: Any, where: str) -> Iterator[bytes | memoryview]:
    """A value as pieces of bytes that are no other value's; each is digested with its length before it."""
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
