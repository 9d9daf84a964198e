"""The engines that have a prefix of a prompt in host memory, from the KV events that they publish.

    GET /kv_event_sources ──→ where an engine publishes ──→ `EventFollower` ──→ `BlockIndex`
    GET /metrics          ──→ where other engines read its host memory
    prompt ── POST /tokenize ──→ tokens ──→ `BlockIndex` ──→ `PrefixHolders` of the prompt

The router has no tokenizer, so an engine tokenises the prompt. A prompt costs that only if engines publish
events, and if its own engine does not have the last turn of its session.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any
from urllib.parse import urlsplit

import zmq
import zmq.asyncio

from kvferry.tools.serving.router.backends import Backend, Engines
from kvferry.tools.serving.router.block_index import BlockIndex, HostBlocks
from kvferry.tools.serving.router.bodies import withdrawal_headers
from kvferry.tools.serving.router.kv_events import EventFollower, Publisher
from kvferry.tools.serving.router.metrics import FollowedRank
from kvferry.tools.serving.router.prompts import TOKENIZE, prompt_tokens, tokenize_request
from kvferry.tools.serving.router.replies import Headers
from kvferry.tools.serving.router.upstream import BROKEN, EngineClient, read_whole
from kvferry.transport import MAX_REMOTE_CACHES

_log = logging.getLogger("kvferry.router")

LEAST_TOKENS = 256
"""Engines read whole chunks of each other, by default of so many tokens. Fewer are not worth a question."""

# Longer than an engine takes for a prompt of a million tokens. Then the request goes on without the answer.
_TOKENIZE_SECONDS = 1.0
_FIRST_DELAY_SECONDS, _LONGEST_DELAY_SECONDS = 0.5, 16.0
_ADDRESS = re.compile(r"^kvferry_fleet_info\{(.*)\} 1", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="([^"]*)"')


@dataclass(frozen=True, slots=True)
class PrefixHolder:
    """A data-parallel rank of an engine that has a prefix of a prompt in host memory."""

    backend: Backend
    tokens: int
    address: str | None  # address at which other engines read that memory; None if they cannot


@dataclass(frozen=True, slots=True)
class PrefixHolders:
    """The engines that have a prefix of one prompt in host memory."""

    holders: Sequence[PrefixHolder] = ()

    def tokens_of(self, backend: Backend) -> int:
        """Return the number of tokens of the longest prefix that an engine has itself."""
        return max((one.tokens for one in self.holders if one.backend is backend), default=0)

    def hint(self, backend: Backend) -> list[str]:
        """Return the engines from which an engine should read, by their addresses.

        These are the engines with the longest prefix, if that is worth a question (`LEAST_TOKENS`).
        """
        others = [one for one in self.holders if one.backend is not backend and one.address is not None]
        longest = max((one.tokens for one in others), default=0)
        if longest < self.tokens_of(backend) + LEAST_TOKENS:
            return []
        named = [one.address for one in others if one.tokens == longest and one.address is not None]
        return named[:MAX_REMOTE_CACHES]


@dataclass(slots=True, eq=False)
class _FollowedEngine:
    """One run of an engine whose events are followed, with what is known of each data-parallel rank."""

    backend: Backend
    losses: int  # `Backend.losses` when the run was first seen
    task: asyncio.Task[None] | None = None
    blocks: dict[int, HostBlocks] = field(default_factory=dict)
    addresses: dict[int, str] = field(default_factory=dict)
    followers: dict[int, EventFollower] = field(default_factory=dict)

    @property
    def gone(self) -> bool:
        return not self.backend.up or self.backend.draining or self.backend.losses != self.losses


class Prefixes:
    """Follows the events of all engines, and finds the engines that have a prefix of a prompt.

    Attributes:
        index: the blocks of all engines.
    """

    def __init__(self, engines: Engines, seconds: float) -> None:
        """Create it. It follows no engine yet. `run` looks every `seconds` which ones are up."""
        self.index = BlockIndex()
        self._engines, self._seconds = engines, seconds
        self._followed: dict[Backend, _FollowedEngine] = {}
        # Endpoints that runs of engines lack: (engine, `Backend.losses`, path).
        self._missing: set[tuple[Backend, int, str]] = set()
        self._client: EngineClient

    async def run(self, client: EngineClient) -> None:
        """Follow the events of all engines that are up, until this coroutine is cancelled."""
        self._client = client
        context = zmq.asyncio.Context()
        try:
            while True:
                self._tick(context)
                await asyncio.sleep(self._seconds)
        finally:
            tasks = [one.task for one in self._followed.values() if one.task is not None]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            context.destroy(linger=0)

    def __iter__(self) -> Iterator[FollowedRank]:
        """Yield the data-parallel ranks of engines whose events are followed."""
        for one in self._followed.values():
            for rank, follower in one.followers.items():
                blocks = len(one.blocks[rank].names)
                yield FollowedRank(one.backend.url, rank, one.addresses.get(rank), blocks, follower.gaps)

    async def find(
        self, path: str, body: Mapping[str, Any], headers: Headers, tokenizer: Backend | None
    ) -> PrefixHolders:
        """Return the engines that have a prefix of a request's prompt.

        Args:
            tokenizer: engine that tokenises the prompt; None if there is none.
        """
        if not len(self.index):
            return PrefixHolders()
        tokens = prompt_tokens(body)
        if tokens is None and tokenizer is not None and (asked := tokenize_request(path, body)) is not None:
            tokens = await self._tokenized(tokenizer, *asked, headers)
        if not tokens:
            return PrefixHolders()
        model, salt = body.get("model"), body.get("cache_salt")
        texts = [one if isinstance(one, str) else None for one in (model, salt)]
        found = self.index.longest(tokens, *texts)
        return PrefixHolders(
            tuple(
                PrefixHolder(one.backend, found[blocks], one.addresses.get(rank))
                for one in self._followed.values()
                if not one.gone
                for rank, blocks in one.blocks.items()
                if blocks in found
            )
        )

    async def _tokenized(
        self, backend: Backend, path: str, body: bytes, headers: Headers
    ) -> list[int] | None:
        """Have an engine tokenise a prompt. Return None if it cannot, or takes too long."""
        missing = backend, backend.losses, path
        if missing in self._missing:
            return None
        with suppress(*BROKEN, TimeoutError, ValueError, RecursionError, KeyError, TypeError):
            async with asyncio.timeout(_TOKENIZE_SECONDS):
                asked = self._client.opened("POST", backend, path, withdrawal_headers(headers), body)
                async with asked as response:
                    reply = await read_whole(response)
            if reply.status == HTTPStatus.NOT_FOUND:
                self._missing.add(missing)
            tokens = json.loads(reply.body)["tokens" if path == TOKENIZE else "token_ids"]
            return prompt_tokens({"prompt": tokens})
        return None

    def _tick(self, context: zmq.asyncio.Context) -> None:
        for backend, one in [*self._followed.items()]:
            if one.gone and one.task is not None:
                one.task.cancel()
                del self._followed[backend]
        for backend in self._engines.known:
            if backend.up and not backend.draining and backend not in self._followed:
                self._followed[backend] = one = _FollowedEngine(backend, backend.losses)
                one.task = asyncio.create_task(self._follow(context, one))

    async def _follow(self, context: zmq.asyncio.Context, engine: _FollowedEngine) -> None:
        publishers = await self._publishers(engine.backend)
        try:
            async with asyncio.TaskGroup() as group:
                for rank, publisher in publishers.items():
                    engine.blocks[rank] = blocks = self.index.add_engine()
                    follower = EventFollower(context, publisher, self.index, blocks)
                    engine.followers[rank] = follower
                    group.create_task(follower.run())
                # An engine shows its metrics from its first step on.
                for delay in _delays():
                    engine.addresses |= addresses_of(await self._page(engine.backend, "/metrics") or b"")
                    if engine.addresses.keys() >= publishers.keys():
                        break
                    await asyncio.sleep(delay)
        except* (zmq.ZMQError, OSError) as errors:
            _log.warning(
                "the router does not follow the events of %s: %s", engine.backend, errors.exceptions[0]
            )
        finally:
            for blocks in engine.blocks.values():
                self.index.remove_engine(blocks)
            engine.blocks.clear()
            engine.followers.clear()

    async def _publishers(self, backend: Backend) -> dict[int, Publisher]:
        """Return where the ranks of an engine publish their events; empty if they publish none."""
        for delay in _delays():
            page = await self._page(backend, "/kv_event_sources")
            if page is not None:
                return publishers_of(page, urlsplit(backend.url).hostname or "")
            await asyncio.sleep(delay)
        raise AssertionError("there is always another delay")

    async def _page(self, backend: Backend, path: str) -> bytes | None:
        """Return a page of an engine, empty if it has none; None if it cannot be had now."""
        with suppress(*BROKEN):
            async with self._client.opened("GET", backend, path) as response:
                reply = await read_whole(response)
                return None if reply.status >= 500 else reply.body if reply.status == 200 else b""
        return None


def publishers_of(page: bytes, host: str) -> dict[int, Publisher]:
    """Return where each data-parallel rank publishes, from an engine's ``/kv_event_sources``.

    Args:
        host: the engine's host, for endpoints on all addresses of its machine.

    >>> publishers_of(b'{"0": {"endpoint": "tcp://*:5557", "replay_endpoint": null}}', "10.0.0.1")
    {0: Publisher(endpoint='tcp://10.0.0.1:5557', replay=None, topic='')}
    """
    found = {}
    with suppress(ValueError, RecursionError, KeyError, TypeError, AttributeError):
        for rank, source in json.loads(page).items():
            endpoint, replay = source["endpoint"], source.get("replay_endpoint")
            if source.get("enable_kv_cache_events", True) and source.get("publisher", "zmq") == "zmq":
                found[int(rank)] = Publisher(
                    _reachable(endpoint, host),
                    None if replay is None else _reachable(replay, host),
                    source.get("topic") or "",
                )
    return found


def addresses_of(page: bytes) -> dict[int, str]:
    """Return where other engines read the host memory of each data-parallel rank, from ``/metrics``.

    >>> addresses_of(b'kvferry_fleet_info{address="10.0.0.1:5700",engine="0",model_name="m"} 1.0')
    {0: '10.0.0.1:5700'}
    """
    found = {}
    for line in _ADDRESS.findall(page.decode(errors="replace")):
        labels = dict(_LABEL.findall(line))
        if labels.get("engine", "").isdecimal() and "address" in labels:
            found[int(labels["engine"])] = labels["address"]
    return found


def _reachable(endpoint: str, host: str) -> str:
    host = f"[{host}]" if ":" in host else host
    return endpoint.replace("*", host, 1).replace("[::]", host, 1).replace("//0.0.0.0:", f"//{host}:", 1)


def _delays() -> Iterator[float]:
    delay = _FIRST_DELAY_SECONDS
    while True:
        yield delay
        delay = min(2 * delay, _LONGEST_DELAY_SECONDS)
