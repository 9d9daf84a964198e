"""Measure the cost of CURVE encryption: kvferry's messages over raw ZeroMQ sockets, encrypted and plain.

kvferry has no unencrypted channel. So kvferry makes a transfer, and the transfer's messages are replayed with
the same sizes and in the same order over a pair of encrypted sockets and a pair of plain sockets. The replay
waits for every answer before it sends the next message, which kvferry does not, so the result is an upper
bound.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest.mock import patch

import zmq

from benchmarks.safety.cost import ProtectionCost, SafetyJob
from kvferry.planning.descriptors import Int64s
from kvferry.planning.strategy import Strategy
from kvferry.tools.bench.movers import KVFerryMover
from kvferry.tools.measuring.producer_process import ProducerProcess, use_transports
from kvferry.tools.measuring.reader import Reader
from kvferry.tools.measuring.simulated import simulate_engine
from kvferry.tools.plan.side import EngineSide
from kvferry.transport import security
from kvferry.transport.addresses import ANY_PEER
from kvferry.transport.gather_client import Done, Gather, GatherClient, Gathered
from kvferry.transport.lease import LeaseWord
from kvferry.transport.listener import _Authenticator
from kvferry.transport.messages import Claim, encode
from kvferry.transport.redeem import Grant, PromptContent, Redeem, Redeemed, new_ticket

TARGET = 0.02
"""Largest allowed share of a transfer's time."""

_PART = "curve"
_QUESTION, _ANSWER = bytes(512), bytes(4096)
_SMALL_ANSWER = encode(Gathered(1, 1, 1, 1))
_END = b"end"
_HOST = "127.0.0.1"
_ROUND_TRIPS = 50
_REPLAYS = 20

_Talk = Sequence[tuple[bytes, bytes]]
"""Messages of the reader, each with its answer; the answer is empty if there is none."""


@dataclass(frozen=True, slots=True)
class _Pair:
    """The client socket of a connected pair, either encrypted or plain. A thread serves the other socket."""

    client: zmq.Socket[Any]

    def say(self, talk: _Talk) -> float:
        """Send messages and wait for their answers, and return the time in seconds."""
        started = time.perf_counter()
        for question, answer in [*talk, (_END, _END)]:
            self.client.send_multipart([question, answer])
            if answer:
                self.client.recv()
        return time.perf_counter() - started


def measure(job: SafetyJob, progress: Callable[[str], None]) -> list[ProtectionCost]:
    """Measure the cost of encryption for round trips, for new connections, and for the messages of transfers.

    Args:
        job: settings of the benchmark.
        progress: function that is called with a line of text before each step.
    """
    keys = security.random_keys()
    with connected_pair(keys) as on, connected_pair(None) as off:
        progress("asking over both kinds of socket")
        trip: _Talk = [(_QUESTION, _ANSWER)] * _ROUND_TRIPS
        found = [_cost(f"{_ROUND_TRIPS} round trips of {len(_ANSWER)} bytes", trip, on, off, job.repeats)]
        found.append(_connecting(keys, job.repeats))
        for strategy in (Strategy.DIRECT, Strategy.STAGED):
            progress(f"moving {job.tokens:,} tokens, {strategy.value}")
            found.append(_transfer(job, strategy, on, off))
    return found


def _cost(work: str, talk: _Talk, on: _Pair, off: _Pair, repeats: int) -> ProtectionCost:
    for pair in (on, off):
        pair.say(talk)
    rounds = [_both(number, lambda: on.say(talk), lambda: off.say(talk)) for number in range(repeats)]
    with_it, without = zip(*rounds, strict=True)
    return ProtectionCost(part=_PART, work=work, on=with_it, off=without)


def _both(number: int, on: Callable[[], float], off: Callable[[], float]) -> tuple[float, float]:
    """Run both functions, and return their times in seconds. In odd rounds, `off` runs first."""
    if number % 2:
        without = off()
        return on(), without
    return on(), off()


def _connecting(keys: security.Keys, repeats: int) -> ProtectionCost:
    """Measure the cost for a new connection with its first round trip, which happens once per peer."""

    def connected(of: security.Keys | None) -> float:
        with _listening(of) as port:
            started = time.perf_counter()
            with _client(of, port) as client:
                client.say([(_QUESTION, _ANSWER)])
                return time.perf_counter() - started

    connected(keys)
    rounds = [_both(number, lambda: connected(keys), lambda: connected(None)) for number in range(repeats)]
    on, off = zip(*rounds, strict=True)
    return ProtectionCost(part=_PART, work="a connection and its first answer", on=on, off=off)


def _transfer(job: SafetyJob, strategy: Strategy, on: _Pair, off: _Pair) -> ProtectionCost:
    """Measure the cost for the messages of a transfer, as a share of the transfer's time."""
    # For the staged strategy, use layouts that differ, so that the runs are short and must be staged.
    sides = EngineSide(layout="LBNHC"), EngineSide(layout="LBHNC" if strategy is Strategy.STAGED else "LBNHC")
    source, destination = (
        simulate_engine(name, job.reading, side, job.tokens, seed=seed)
        for seed, (name, side) in enumerate(zip(("source", "destination"), sides, strict=True), 1)
    )
    moved, talks = list[float](), list[tuple[float, float]]()
    with ProducerProcess([source], use_transports(None)) as producer, Reader(destination, producer) as reader:
        ferry = KVFerryMover("kvferry", reader, source, strategy=strategy)
        ferry.move()
        for number in range(job.repeats):
            with _recording_gathers() as gathers:
                moved.append(ferry.move())
            talk = messages_of(gathers, [table.tolist() for table in source.tables], job.tokens)
            talks.append(_both(number, partial(_often, on, talk), partial(_often, off, talk)))
    work = f"{len(talk)} messages of a {'+'.join(dict.fromkeys(ferry.strategies))} transfer"
    with_it, without = zip(*talks, strict=True)
    return ProtectionCost(part=_PART, work=work, on=with_it, off=without, whole=tuple(moved), target=TARGET)


def _often(pair: _Pair, talk: _Talk) -> float:
    """Return the mean time of many replays in seconds. A single one is too short to time."""
    return sum(pair.say(talk) for _ in range(_REPLAYS)) / _REPLAYS


@contextmanager
def _recording_gathers() -> Iterator[list[int]]:
    """Record the number of cells in each request to gather that readers send while the block runs."""
    ask, found = GatherClient.ask, list[int]()

    def recording(
        self: GatherClient, route: int, lease: LeaseWord, blocks: Int64s, *rest: Any, **named: Any
    ) -> int:
        found.append(len(blocks))
        return ask(self, route, lease, blocks, *rest, **named)

    with patch.object(GatherClient, "ask", recording):
        yield found


def messages_of(gathers: Sequence[int], tables: Sequence[list[int]], tokens: int) -> _Talk:
    """Return the messages of schedulers and workers for one transfer, with their answers.

    Args:
        gathers: number of cells in each request to gather.
        tables: block tables in the answer to the ticket.
        tokens: length of the request, in tokens.
    """
    ticket, digest = new_ticket(), secrets.token_hex(16)
    redeem = Redeem(1, 1, ticket, tokens, PromptContent(digest, salt=digest))
    redeemed = Redeemed(1, Grant.of(LeaseWord(0, 1, 1), tokens, tables))
    talk = [(encode(redeem), encode(redeemed))]
    for cells in gathers:
        talk.append((encode(Gather(1, 0, 0, 1, bytes(4 * cells), bytes(4 * cells))), _SMALL_ANSWER))
        talk.append((encode(Done(1)), b""))
    talk.append((encode(Claim(1, [ticket], released=True)), b""))
    return talk


@contextmanager
def connected_pair(keys: security.Keys | None) -> Iterator[_Pair]:
    """Yield a pair of sockets that are encrypted with these keys; None for a plain pair."""
    with _listening(keys) as port, _client(keys, port) as pair:
        pair.say([])
        yield pair


@contextmanager
def _client(keys: security.Keys | None, port: int) -> Iterator[_Pair]:
    context: zmq.Context[Any] = zmq.Context()
    socket: zmq.Socket[Any] = context.socket(zmq.DEALER)
    socket.linger = 0
    if keys is not None:
        security.secure_client(socket, keys)
    socket.connect(f"tcp://{_HOST}:{port}")
    try:
        yield _Pair(socket)
    finally:
        socket.close()
        context.term()


@contextmanager
def _listening(keys: security.Keys | None) -> Iterator[int]:
    """Run a server in a thread while the block runs, and yield its port. Each message contains its answer.

    Args:
        keys: CURVE keys; None for a plain socket.
    """
    context: zmq.Context[Any] = zmq.Context()
    door = _Authenticator(context, keys, ANY_PEER) if keys is not None else None
    socket: zmq.Socket[Any] = context.socket(zmq.ROUTER)
    socket.linger = 0
    if keys is not None:
        security.secure_server(socket, keys)
    port = socket.bind_to_random_port(f"tcp://{_HOST}")
    ended = threading.Event()

    def run() -> None:
        while not ended.is_set():
            if socket.poll(50):
                sender, _, answer = socket.recv_multipart()
                if answer:
                    socket.send_multipart([sender, answer])
        socket.close()

    thread = threading.Thread(target=run, name="bench-echo", daemon=True)
    thread.start()
    try:
        yield port
    finally:
        ended.set()
        thread.join()
        if door is not None:
            door.close()
        context.term()
