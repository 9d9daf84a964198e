"""An engine without a model whose ranks run on several machines: processes in network namespaces.

The connector's halves are real, with real NIXL between the machines and real tiers. A pipe stands for the
engine's own channel. "Computing" a prompt writes bytes to its blocks, which depend on the prompt, the layer,
the head and the position.
"""

from __future__ import annotations

import logging
import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing import get_context
from multiprocessing.connection import Connection, Pipe
from multiprocessing.process import BaseProcess
from typing import Any, Self

from support.namespaces import Host, enter

LOAD_SECONDS = 3.0
CHUNK, BLOCK = 64, 16
PATIENCE = 60.0


def model() -> Any:
    from kvferry.geometry import GroupKind
    from kvferry.tools.models.store import LayerCache
    from support.models import attention, model as made_up

    kv = attention(heads=4, k=32, v=32)
    return made_up(kv, LayerCache(GroupKind.SLIDING, 24, kv.fields), kv, kv)


def shape(ranks: int, stages: tuple[int, ...] = ()) -> Any:
    """Return the shape of an engine with so many tensor-parallel ranks, or with pipeline stages."""
    from kvferry.tools.models.layout import EngineShape

    return EngineShape(1 if stages else ranks, stages or (4,), BLOCK, "LBHNC", 200)


def settings(host: Host, tiers: list[dict[str, Any]]) -> Any:
    from kvferry.connector.config import parse_config

    return parse_config(
        {
            "host": host.address,
            "tiers": tiers,
            "chunk_tokens": CHUNK,
            "load_timeout_seconds": LOAD_SECONDS,
        }
    )


class Rank:
    """A rank: its worker half, and its KV cache."""

    def __init__(self, config: Any, number: int, of: Any) -> None:
        from kvferry.connector.worker import WorkerHalf
        from kvferry.tools.measuring.owned import allocate

        self._cache = allocate(model(), of, number, "cpu")
        self.half = WorkerHalf()
        self.info = self.half.start("e", self._cache.geometry, config)

    def step(self, orders: Any, computed: Sequence[tuple[int, Any]]) -> tuple[Any, Any]:
        self.half.raise_words(orders)
        self.half.begin(orders)
        for seed, tables in computed:
            self.compute(seed, tables)
        self.half.save(orders, lambda: None)
        return self.half.ended(), self.half.take_reports()

    def compute(self, seed: int, tables: Any) -> None:
        """Write what a prompt has in these blocks."""
        import numpy as np

        memory, values = self._cache.buffer.numpy(), []
        for noise in (0, 255):
            values.append(np.full(len(memory), noise, np.uint8))
            self._fill(tables, values[-1])
        written = values[0] == values[1]
        memory[written] = values[0][written] ^ seed

    def wrong_bytes(self, seed: int, tables: Any, tokens: int, prompt: int) -> int:
        """Return how many bytes that a continuation after `tokens` tokens needs are not the prompt's."""
        import numpy as np

        from kvferry.planning.select import LoadSpan
        from support.oracle import expect

        rank, memory = self._cache.geometry, self._cache.buffer.numpy()
        arrays = [np.array(table, np.int64)[: -(-tokens // BLOCK)] for table in tables]
        spans = [LoadSpan(0, tokens, prompt)] * len(arrays)
        expected = expect(rank, [rank], spans, arrays, memory.copy())
        assert expected.must.any()
        return int((memory[expected.must] ^ seed != expected.value[expected.must]).sum())

    def spoil_host_memory(self) -> None:
        """Change every byte of this machine's arena."""
        self.half._mover._arena.memory[:] ^= 255

    def _fill(self, tables: Any, into: Any) -> None:
        import numpy as np

        from support.oracle import Memory, fill

        rank = self._cache.geometry
        fill(rank, [np.array(table, np.int64) for table in tables], Memory(rank.regions[0].address, into))


class Lead:
    """The engine's scheduler, and its first rank."""

    def __init__(self, config: Any, others: Sequence[Connection], stages: tuple[int, ...]) -> None:
        from kvferry.connector.engine import CacheGroup
        from kvferry.connector.scheduler import SchedulerHalf
        from support.fake_engine import FakeEngine
        from support.stores import NAMESPACE

        self._records: list[logging.LogRecord] = []
        handler = logging.Handler()
        handler.emit = self._records.append
        logging.getLogger().addHandler(handler)
        self.rank = Rank(config, 0, shape(1 + len(others), stages))
        self._others: list[Connection | None] = list(others)
        infos = [self.rank.info, *(other.recv() for other in others)]
        groups = [
            CacheGroup(kind=one.kind, attention_span=one.attention_span, block_tokens=one.block_tokens)
            for one in infos[0].geometry.groups
        ]
        self._engine = FakeEngine(groups, blocks=200, workers=len(infos))
        self._engine.half = self.half = SchedulerHalf(
            self._engine.facts,
            config,
            infos,
            self._engine.pool,
            facts=lambda _: None,
            namespace=lambda _: NAMESPACE,
            events=self._engine.events,
        )
        self._requests: dict[int, Any] = {}
        self._count = self._ordered = 0

    @property
    def tiering(self) -> Any:
        return self.half._tiering

    def step(self, *work: Any, computed: Sequence[tuple[int, Any]] = ()) -> Any:
        """Run a step on all ranks that are there. Return (received, failed) of this rank."""
        orders = self._engine.begin(*work)
        assert orders is not None
        self._ordered += len(orders.stores)
        computed = [(seed, self._engine.table_ids(request)) for seed, request in computed]
        for number, other in enumerate(self._others):
            if other is not None:
                self._tell(number, ("step", orders, computed))
        ended, reports = self.rank.step(orders, computed)
        merged = [reports] if reports is not None else []
        for number, other in enumerate(self._others):
            if other is not None and (answer := self._hear(number)) is not None:
                merged += [answer[1]] if answer[1] is not None else []
        for more in merged[1:]:
            merged[0].add(more)
        if merged:
            self.half.take_reports(merged[0])
        self.half.step_done()
        return ended

    def _tell(self, number: int, what: Any) -> None:
        try:
            self._others[number].send(what)
        except OSError:
            self._others[number] = None

    def _hear(self, number: int) -> Any:
        try:
            # A rank that is stopped answers nothing. An engine would wait; this one goes on without it.
            if self._others[number].poll(self.silence):
                return self._others[number].recv()
        except (EOFError, OSError):
            pass
        self._others[number] = None
        return None

    silence = 30.0

    def settle(self, seconds: float = PATIENCE) -> bool:
        """Run steps until the connector needs none. Return whether it came to that."""
        ends = time.monotonic() + seconds
        while self.half.busy and time.monotonic() < ends:
            self.step()
            time.sleep(1e-3)
        return not self.half.busy

    def request(self, seed: int, tokens: int) -> Any:
        from support.block_pool import request

        self._count += 1
        prompt = [seed, *range(1000, 1000 + tokens - 1)]
        return self._engine.arrive(request(f"r{self._count}", prompt))

    def serve(self, seed: int, tokens: int) -> tuple[dict[str, int], int, float]:
        """Serve a prompt: load what the tiers have, compute the rest, and store it.

        Return the loaded tokens by tier, wrong bytes on all ranks, and the seconds until it is computed.
        """
        request, began = self.request(seed, tokens), time.monotonic()
        found, failed = self._load(request)
        seconds = time.monotonic() - began
        loaded = 0 if failed else sum(found.values())
        wrong = 0
        if loaded:
            wrong = self._wrong(seed, request, min(loaded, tokens - 1), tokens)
        request.num_computed_tokens = min(loaded, tokens - 1)
        self.step((request, tokens - request.num_computed_tokens), computed=[(seed, request)])
        self._engine.finish(request)
        return ({} if failed else found), wrong, seconds

    def _load(self, request: Any) -> tuple[dict[str, int], bool]:
        ends, failed = time.monotonic() + PATIENCE, False
        while time.monotonic() < ends:
            tokens = self._engine.admit(request)
            if tokens is None:
                self.step()
                continue
            if not tokens:
                return {}, False
            found = Counter(self.half.admission.origins(request.request_id))
            while time.monotonic() < ends:
                ended = self.step()
                if request.request_id in ended.received:
                    break
                time.sleep(1e-3)
            else:
                break
            if request.request_id not in ended.failed:
                return dict(found), False
            failed = True
            self._engine.free(request)
        raise TimeoutError(f"the request waits for ever (a load failed: {failed})")

    def _wrong(self, seed: int, request: Any, tokens: int, prompt: int) -> int:
        tables = self._engine.table_ids(request)
        wrong = self.rank.wrong_bytes(seed, tables, tokens, prompt)
        for number, other in enumerate(self._others):
            if other is not None:
                self._tell(number, ("wrong_bytes", seed, tables, tokens, prompt))
                if (answer := self._hear(number)) is not None:
                    wrong += answer
        return wrong

    def stores(self) -> int:
        """Return how many stores were ordered so far."""
        return self._ordered

    def spoil(self, number: int) -> None:
        """Change every byte of a machine's arena: 0 is that of the scheduler."""
        if not number:
            self.rank.spoil_host_memory()
            return
        self._tell(number - 1, ("spoil_host_memory",))
        self._hear(number - 1)

    def evict(self) -> int:
        """Drop all chunks in host memory."""
        return self.tiering.drop_host_memory()

    def reset(self) -> None:
        """Begin a new epoch, as a reset of the engine's cache does."""
        self.tiering.start_anew()

    def errors(self) -> list[str]:
        """Return the errors that were logged in this process."""
        return [record.getMessage() for record in self._records if record.levelname == "ERROR"]

    def in_host(self) -> int:
        return len(self.tiering._cache.host)

    def counts(self) -> dict[str, int]:
        cache = self.tiering._cache
        found = {"copied": cache.counts.stored, "failed": cache.counts.failed}
        for slow in cache.slow_tiers:
            found |= {f"put {outcome}": n for outcome, n in slow.tier.stats.puts.items()}
            found |= {f"got {outcome}": n for outcome, n in slow.tier.stats.gets.items()}
        return found

    def lost(self) -> str:
        return self.tiering._arenas.lost

    def busy(self) -> bool:
        return self.half.busy

    def owed(self) -> int:
        return self.tiering.owed_chunks

    def check(self) -> None:
        self.tiering._cache.host.check_integrity()

    def be_patient(self, seconds: float) -> None:
        """Wait so long for another rank's answer, from now on."""
        self.silence = seconds

    def hold_transfers(self) -> None:
        """Keep transfers between machines from beginning until `release_transfers`."""
        self.tiering._arenas.exchange._transfers.lock.acquire()

    def release_transfers(self) -> None:
        self.tiering._arenas.exchange._transfers.lock.release()

    def close(self) -> None:
        self.half.shutdown()
        self.rank.half.shutdown()


def _enter(host: Host) -> None:
    enter(host.name)
    os.environ |= {"UCX_TLS": "tcp,self", "UCX_NET_DEVICES": host.device}


def rank_process(
    host: Host,
    tiers: list[dict[str, Any]],
    number: int,
    ranks: int,
    stages: tuple[int, ...],
    pipe: Connection,
) -> None:
    """One of the other ranks, until the pipe closes."""
    _enter(host)
    rank = Rank(settings(host, tiers), number, shape(ranks, stages))
    pipe.send(rank.info)
    while True:
        try:
            verb, *arguments = pipe.recv()
        except EOFError:
            rank.half.shutdown()
            return
        pipe.send(getattr(rank, verb)(*arguments))


def lead_process(
    host: Host,
    tiers: list[dict[str, Any]],
    others: Sequence[Connection],
    stages: tuple[int, ...],
    pipe: Connection,
) -> None:
    """The scheduler and the first rank, until the pipe closes."""
    _enter(host)
    lead = Lead(settings(host, tiers), others, stages)
    while True:
        pipe.send((True, None))
        try:
            verb, *arguments = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send((True, getattr(lead, verb)(*arguments)))
        except Exception as error:  # noqa: BLE001 - the test is told
            pipe.send((False, repr(error)))


class Machines:
    """An engine with one rank on each of some hosts, seen from a test.

    `engine.serve(1, 300)` calls `Lead.serve` in the process of the scheduler.
    """

    def __init__(
        self, hosts: Sequence[Host], tiers: list[dict[str, Any]], stages: tuple[int, ...] = ()
    ) -> None:
        """Start the engine: tensor-parallel ranks, or pipeline stages with these numbers of layers."""
        context = get_context("spawn")
        self.others: list[BaseProcess] = []
        ends = []
        for number, host in enumerate(hosts[1:], 1):
            ours, theirs = Pipe()
            process = context.Process(
                target=rank_process, args=(host, tiers, number, len(hosts), stages, theirs), daemon=True
            )
            process.start()
            theirs.close()
            self.others.append(process)
            ends.append(ours)
        self._pipe, theirs = Pipe()
        self.lead = context.Process(
            target=lead_process, args=(hosts[0], tiers, ends, stages, theirs), daemon=True
        )
        self.lead.start()
        for end in (theirs, *ends):
            end.close()
        self._hear()

    def _hear(self) -> Any:
        if not self._pipe.poll(2 * PATIENCE):
            raise TimeoutError("the engine hangs")
        well, value = self._pipe.recv()
        if not well:
            raise RuntimeError(value)
        return value

    def begin(self, verb: str, *arguments: Any) -> Callable[[], Any]:
        """Call a method, and return a function that waits for its result."""
        self._pipe.send((verb, *arguments))

        def result() -> Any:
            value = self._hear()
            self._hear()
            return value

        return result

    def __getattr__(self, verb: str) -> Any:
        if verb.startswith("_"):
            raise AttributeError(verb)
        return lambda *arguments: self.begin(verb, *arguments)()

    def kill(self, number: int = 0) -> None:
        """Kill a rank on another machine."""
        self.others[number].kill()
        self.others[number].join()

    def kill_lead(self) -> None:
        """Kill the scheduler and the first rank."""
        self.lead.kill()
        self.lead.join()

    def stop(self, number: int = 0) -> None:
        """Let a rank on another machine do nothing more; its process stays."""
        os.kill(self.others[number].pid, signal.SIGSTOP)

    def end(self) -> None:
        for process in (self.lead, *self.others):
            if process.is_alive():
                process.kill()
            process.join()
        with suppress(OSError):
            self._pipe.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()
