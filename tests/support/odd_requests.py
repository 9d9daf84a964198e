"""Requests of an API client who means harm, or has a fault, for an engine that it reaches directly."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

VALUES: dict[str, Any] = {
    "none": None,
    "true": True,
    "negative": -1,
    "zero": 0,
    "wide": 2**63,
    "fraction": 1.5,
    "empty": "",
    "control": "a\nb\x00\x1b[2J",
    "long": "x" * 100_000,
    "list": [[1, 2], [3]],
    "empty list": [],
    "object": {"a": {"b": [1]}},
    "ids": [list(range(3)) for _ in range(6)],
}
SHAPES: dict[str, dict[str, Any]] = {
    "stream": {"stream": True},
    "samples": {"n": 3, "temperature": 1.0},
    "beams": {"use_beam_search": True, "n": 2},
    "prompt logprobs": {"prompt_logprobs": 2},
    "echo": {"echo": True, "max_tokens": 0},
    "empty prompt": {"prompt": ""},
    "no prompt": {"prompt": []},
    "one token": {"prompt": [1]},
    "too long": {"prompt": [5] * 4000},
    "no token": {"prompt": [2**31 - 1]},
    "two prompts": {"prompt": ["a b c", "d e f"]},
    "unknown model": {"model": "nobody"},
    "priority": {"priority": -(2**40)},
    "pooling": {"task": "embed", "encoding_format": "float"},
    "salt": {"cache_salt": "a\nb"},
    "long salt": {"cache_salt": "s" * 100_000},
    "odd salt": {"cache_salt": ["s"]},
    "id of another": {"request_id": "victim"},
    "odd id": {"request_id": "a\nb\x00\x1b[2J"},
    "long id": {"request_id": "x" * 100_000},
}
FAILS_IN_VLLM = frozenset({"half a pair", "half an id", "xargs text", "xargs number", "xargs list"})
"""Answered with status 500 by vLLM's API server; the engine never has them."""


def odd_requests(offer: dict[str, Any]) -> Iterator[tuple[str, bytes]]:
    """Yield names and bodies, which lack a model and a prompt unless they are about these.

    Args:
        offer: ``kv_transfer_params`` that an engine has answered with, to be varied.
    """

    def body(name: str, **fields: Any) -> tuple[str, bytes]:
        return name, json.dumps(fields).encode()

    for key in (*offer, "unknown"):
        for name, value in VALUES.items():
            if (key, name) != ("do_remote_decode", "true"):  # `both`
                yield body(f"{key} {name}", kv_transfer_params={**offer, key: value})
    for name, fields in SHAPES.items():
        yield body(name, kv_transfer_params=offer, **fields)
        # Refused by the API server, and passed on to the engine all the same.
        yield body(f"refused {name}", kv_transfer_params=offer, **{**fields, "model": "nobody"})
    yield body("half a pair", kv_transfer_params={**offer, "remote_engine_id": "\ud800"})
    yield body("half a salt", kv_transfer_params=offer, cache_salt="\ud800")
    yield body("half an id", kv_transfer_params=offer, request_id="\ud800")
    for name, value in {"text": "x", "number": 3, "list": ["a"], "nothing": 0, "no list": []}.items():
        yield body(f"xargs {name}", vllm_xargs={"kv_transfer_params": value})
    for levels in (100, 600, 900, 2000):
        value = b'{"do_remote_prefill": true, "a": ' + b"[" * levels + b"]" * levels + b"}"
        yield f"{levels} levels", b'{"kv_transfer_params": ' + value + b"}"
        yield f"{levels} levels to encode", b'{"ec_transfer_params": ' + value + b"}"
