"""KV events as an engine publishes them, and a router's view of them."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence
from hashlib import sha256
from math import lcm
from pathlib import Path
from typing import Any, Self, TypeAlias

import msgspec
import zmq
from vllm.distributed.kv_events import BlockRemoved, BlockStored, KVEventBatch

QUIET_SECONDS = 0.5
Hash: TypeAlias = "int | bytes"


def endpoint(folder: Path) -> str:
    """Where an engine publishes, of a folder with a short path."""
    return f"ipc://{folder / 'kv'}"


def publishing(folder: Path) -> dict[str, Any]:
    """``kv_events_config`` of an engine that publishes there."""
    return {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": endpoint(folder)}


def hashes(tokens: Sequence[int], size: int, seed: str = "", before: Sequence[int] = ()) -> list[bytes]:
    """An engine's hashes of the blocks of these tokens, which follow others."""
    whole = [*before, *tokens]
    ends = range(len(before) + size, len(whole) + 1, size)
    return [sha256(f"{seed} {whole[:end]}".encode()).digest() for end in ends]


def stored(
    tokens: Sequence[int], size: int, seed: str = "", before: Sequence[int] = (), **more: Any
) -> BlockStored:
    """The event that host memory has the blocks of these tokens, which follow others."""
    parent = hashes(before, size, seed)[-1] if before else None
    kind = {"group_idx": 0, "kv_cache_spec_kind": "full_attention", "ownership": "host"}
    named = hashes(tokens, size, seed, before)
    fields = {"lora_id": None, "medium": "CPU", "lora_name": None, **kind, **more}
    return BlockStored(named, parent, [*tokens], size, **fields)


def removed(
    tokens: Sequence[int], size: int, seed: str = "", before: Sequence[int] = (), group_idx: int = 0
) -> BlockRemoved:
    """The event that host memory has these blocks no more."""
    named = hashes(tokens, size, seed, before)
    return BlockRemoved(named, "CPU", group_idx=group_idx, ownership="host")


def batch(*events: BlockStored | BlockRemoved) -> bytes:
    return msgspec.msgpack.encode(KVEventBatch(ts=0.0, events=[*events], data_parallel_rank=0))


class Router:
    """Follows an engine's events. It knows blocks by (medium, tier, group); the engine's own have no tier.

    Attributes:
        blocks: hashes of the blocks that are in a place now.
        events: everything received, decoded, without a schema.
        groups: kind, window and tokens per block of each group with blocks in a tier.
    """

    def __init__(self, at: str) -> None:
        self.blocks: defaultdict[tuple[str | None, str | None, int], set[bytes]] = defaultdict(set)
        self.events: list[dict[str, Any]] = []
        self.groups: dict[int, tuple[str, int, int]] = {}
        self._names: dict[tuple[Hash | None, tuple[int, ...]], Hash] = {}
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.SUB)
        self._socket.setsockopt(zmq.SUBSCRIBE, b"")
        self._socket.connect(at)
        time.sleep(QUIET_SECONDS)  # a subscription takes a moment to arrive, and nothing tells when

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close(0)
        self._context.term()

    def follow(self) -> None:
        """Take all events, until none comes for a while."""
        while self._socket.poll(int(QUIET_SECONDS * 1000)):
            _, _, payload = self._socket.recv_multipart()
            for event in msgspec.msgpack.decode(payload)[1]:
                self.events.append(event)
                self._apply(event)

    def _apply(self, event: dict[str, Any]) -> None:
        if event["type"] == "AllBlocksCleared":
            self.blocks.clear()
            return
        place = self.blocks[event["medium"], event.get("ownership"), event["group_idx"]]
        if event["type"] == "BlockStored":
            place.update(event["block_hashes"])
            if len(event["token_ids"]) == event["block_size"] * len(event["block_hashes"]):
                self._learn(event)  # vLLM's own events leave out hashes before a window, and no tokens
        else:
            place.difference_update(event["block_hashes"])

    def longest(self, medium: str, tier: str, prompt: list[int]) -> int:
        """Tokens of the longest prefix, shorter than the prompt, of which a tier has all groups' blocks."""
        step = lcm(*(block for kind, _, block in self.groups.values() if kind != "mamba"))
        ends = range((len(prompt) - 1) // step * step, 0, -step)
        return next((end for end in ends if self._continues((medium, tier), prompt, end)), 0)

    def _continues(self, place: tuple[str, str], prompt: list[int], end: int) -> bool:
        for group, (kind, window, block) in self.groups.items():
            first = max(end - window + 1, 0) // block if window else 0
            first = end // block - 1 if kind == "mamba" else first
            name, here = None, self.blocks[(*place, group)]
            for at in range(end // block):
                name = self._names.get((name, tuple(prompt[at * block : (at + 1) * block])))
                if name is None or (at >= first and name not in here):
                    return False
        return True

    def _learn(self, event: dict[str, Any]) -> None:
        """Learn the names of blocks from their tokens and the block before."""
        size, name = event["block_size"], event["parent_block_hash"]
        if event["medium"] != "GPU":
            window = event.get("kv_cache_spec_sliding_window") or 0
            self.groups[event["group_idx"]] = event["kv_cache_spec_kind"], window, size
        for at, one in enumerate(event["block_hashes"]):
            tokens = tuple(event["token_ids"][at * size : (at + 1) * size])
            self._names[name, tokens] = one
            name = one
