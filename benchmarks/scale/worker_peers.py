"""The worker's part of a decode engine with many peers: a reading thread with a NIXL agent, but no engine.

The peers are one worker in this process. Its transport metadata is loaded under many names of equal length,
so that NIXL keeps a remote agent and UCX an endpoint for each.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import ExitStack, closing
from itertools import count

import numpy as np
from msgspec import structs

from benchmarks.overhead.planning import small_pages
from benchmarks.scale.producer import BLOCK_TOKENS
from kvferry.common.errors import TransferError
from kvferry.tools.measuring.simulated import read_geometry, simulate_engine
from kvferry.tools.plan.side import EngineSide
from kvferry.transport.costs import TransferSettings
from kvferry.transport.lease import LeaseWord, LeaseWords, new_incarnation
from kvferry.transport.messages import RankCard
from kvferry.transport.metadata import MemoryCard
from kvferry.transport.metadata_validation import MetadataValidator
from kvferry.transport.read_plan import ReadOrder, Report
from kvferry.transport.transfers import Transfers

_MODEL, _TOKENS = "Llama-3.1-8B", 1024
_LEASE_SLOTS = 8192
_READ_PEERS, _LOADS = 5, 40
_PATIENCE_SECONDS = 60.0


class _NoValidator(MetadataValidator):
    """A stand-in for the child process that validates transport metadata. It accepts all."""

    def __init__(self) -> None:
        """Start nothing."""

    def validate(self, cards: Sequence[MemoryCard]) -> Future[str]:  # noqa: ARG002 - it accepts all
        """Accept the metadata at once."""
        passed: Future[str] = Future()
        passed.set_result("")
        return passed

    def warm_up(self) -> None:
        """Do nothing."""

    def close(self, patience_seconds: float = 0.0) -> None:
        """Do nothing."""


class WorkerPeers:
    """The transfers of one worker of a decode engine, and one worker of a prefill engine."""

    def __init__(self) -> None:
        """Allocate the KV caches, and start the NIXL agents."""
        reading, side = small_pages(read_geometry(_MODEL)), EngineSide(block_tokens=BLOCK_TOKENS)
        self._src, self._dst = (
            simulate_engine(name, reading, side, _TOKENS, seed=seed)
            for seed, name in enumerate(("src", "dst"), 1)
        )
        self._caches = self._src.allocated(0), self._dst.allocated(0)
        settings = TransferSettings(lanes=1, staging_bytes=0)
        self._names = [f"bench-scale-{new_incarnation():08x}-{side}" for side in ("src", "dst")]
        with ExitStack() as stack:
            src, dst = (
                stack.enter_context(
                    closing(
                        Transfers(
                            name,
                            cache.geometry,
                            LeaseWords(new_incarnation(), _LEASE_SLOTS),
                            settings,
                            validator=_NoValidator(),
                        )
                    )
                )
                for name, cache in zip(self._names, self._caches, strict=True)
            )
            self._stack = stack.pop_all()
        self._card, self._incarnation, self._transfers = src.card, src.words.incarnation, dst
        self._known, self._numbers = 0, count()

    def connect(self, peers: int) -> float:
        """Connect to further peers. Return the seconds until the reading thread has connected to all."""
        began = time.perf_counter()
        for number in range(self._known, self._known + peers):
            self._transfers.connect(_peer(number), [self._named(number)])
        # The thread executes commands in order, and refuses this order when it has executed all of them.
        self._read("no peer")
        self._known += peers
        return time.perf_counter() - began

    def time_load(self) -> tuple[float, float]:
        """Return the median seconds of a load from a known peer, and of its planning.

        The first load from each peer is not counted, because UCX then connects its endpoint.

        Raises:
            TransferError: a load failed.
        """
        known = [self._known * part // _READ_PEERS for part in range(_READ_PEERS)]
        times, plans = [], []
        for number in range(_READ_PEERS + _LOADS):
            began = time.perf_counter()
            report = self._read(_peer(known[number % _READ_PEERS]))
            times.append(time.perf_counter() - began)
            if report.failure is not None:
                raise TransferError(f"a load from a peer in this process failed: {report.failure}")
            plans.append(report.figures.plan_seconds)
        return float(np.median(times[_READ_PEERS:])), float(np.median(plans[_READ_PEERS:]))

    def close(self) -> None:
        """End the reading threads, and release the memory."""
        self._stack.close()

    def _read(self, peer: str) -> Report:
        order = ReadOrder(
            f"load-{next(self._numbers)}",
            peer,
            self._src.span,
            self._src.tables,
            self._dst.tables,
            LeaseWord(0, 0, self._incarnation),
        )
        began = time.perf_counter()
        self._transfers.submit(order)
        while not (results := self._transfers.results()):
            if time.perf_counter() - began > _PATIENCE_SECONDS:
                raise TransferError(f"a read from {peer} did not end within {_PATIENCE_SECONDS:g} s")
            time.sleep(1e-5)
        return results[0][1]

    def _named(self, number: int) -> RankCard:
        """Return the description of the peer's worker, whose transport metadata has another name."""
        name = self._names[0].encode()
        other = name[: -len("0000-src")] + f"{number:04x}-src".encode()
        return structs.replace(self._card, agent=self._card.agent.replace(name, other))


def _peer(number: int) -> str:
    return f"peer {number}"
