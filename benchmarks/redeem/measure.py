"""Measure the time to redeem a ticket: a round trip between two processes over the encrypted control channel.

A ticket is the random id that claims the lease on offered KV blocks. The producer is a process with a control
channel and published tickets. It is measured idle, and while a thread in it computes in Python without a
pause, because in an engine the scheduler's thread holds the interpreter lock during a part of each step. The
consumers are control clients in this process. A consumer that knows the producer only redeems, alternately
with and without a sealed grant. A new consumer makes a handshake, alternately with and without a ticket after
its first message.
"""

from __future__ import annotations

import multiprocessing
import secrets
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection

from benchmarks.redeem.tables import BLOCK_TOKENS, FAMILIES, UsedPool
from kvferry.common.errors import TransferError
from kvferry.connector.peers.source import STEP_WAIT_SECONDS
from kvferry.geometry import GroupKind
from kvferry.tools.measuring.rounds import Spread, percentile
from kvferry.tools.models.layout import EngineShape, lay_out
from kvferry.tools.models.store import LayerCache, ModelCache, StoredField
from kvferry.transport.control_client import ControlClient
from kvferry.transport.control_server import ControlServer
from kvferry.transport.handshake import Address, Pending
from kvferry.transport.lease import LeaseWord
from kvferry.transport.messages import SEAL_KEY_BYTES, Facts, PeerInfo, RankCard
from kvferry.transport.redeem import Grant, PromptContent, Redeemed, new_ticket
from kvferry.transport.redemptions import Redemption
from kvferry.transport.seal import SealBinding, open_seal, seal_grant
from kvferry.transport.security import Keys, random_keys

PRODUCERS = ("at rest", "beside a thread that never rests")
_HOST, _RUN = "127.0.0.1", 1
_CONTENT = PromptContent("0" * 32)
_PATIENCE_SECONDS = 30.0
_NEW_EVERY = 20
_POOLS, _SEALS = 5, 20

LENGTHS = (512, 2048, 8192, 32_768, 131_072)
"""Numbers of tokens of the prompts whose grants are sealed."""


@dataclass(frozen=True, slots=True)
class RedeemTimes:
    """The times with one producer, in seconds.

    Attributes:
        producer: state of the producer, one of `PRODUCERS`.
        known: time of each redemption at a known peer, until it has answered.
        sealed: time of each redemption at a known peer, until the grant that came with the ticket is opened.
        handshakes: time of each handshake with a new peer without a ticket.
        both: time of each handshake with a new peer, until a ticket is redeemed too.
    """

    producer: str
    known: tuple[float, ...]
    sealed: tuple[float, ...]
    handshakes: tuple[float, ...]
    both: tuple[float, ...]

    @property
    def within_a_step(self) -> float:
        """Return the share of redemptions at a known peer that end within the time that a step waits."""
        return sum(seconds <= STEP_WAIT_SECONDS for seconds in self.known) / len(self.known)

    @property
    def beside_handshake(self) -> Spread:
        """Return the time of a handshake with a ticket as a multiple of one without, pair by pair."""
        pairs = zip(self.both, self.handshakes, strict=True)
        return Spread.of([with_ticket / without for with_ticket, without in pairs])

    def percentiles(self, *, sealed: bool = False) -> tuple[float, ...]:
        """Return the 50th, 90th and 99th percentile of redemptions at a known peer, in seconds."""
        return tuple(percentile(self.sealed if sealed else self.known, q) for q in (50, 90, 99))


@dataclass(frozen=True, slots=True)
class SealSize:
    """The length of a sealed grant in characters, 0 if it is too long, and the seconds to seal and open it.

    The block tables are those of a model family (`FAMILIES`) in a pool that other prompts have used. Medians.
    """

    family: str
    tokens: int
    characters: int
    seal_seconds: float
    open_seconds: float


def measure_seals() -> list[SealSize]:
    """Seal the block tables of prompts of several families and lengths."""
    return [
        _seal_size(name, tokens, [UsedPool(family, seed).tables(tokens) for seed in range(_POOLS)])
        for name, family in FAMILIES.items()
        for tokens in LENGTHS
    ]


def _seal_size(family: str, tokens: int, pools: Sequence[list[list[int]]]) -> SealSize:
    key, binding = (
        secrets.token_bytes(SEAL_KEY_BYTES),
        SealBinding((_HOST, 1), new_ticket(), tokens, _CONTENT),
    )
    lengths, sealing, opening = list[int](), list[float](), list[float]()
    for tables in pools:
        grant = Grant.of(LeaseWord(0, 0, _RUN), tokens, tables)
        for _ in range(_SEALS):
            began = time.perf_counter()
            sealed = seal_grant(key, grant, binding)
            sealing.append(time.perf_counter() - began)
            if sealed:
                began = time.perf_counter()
                open_seal(key, sealed, binding)
                opening.append(time.perf_counter() - began)
        lengths.append(len(sealed))
    opened = percentile(opening, 50) if opening else 0.0
    return SealSize(family, tokens, int(percentile(lengths, 50)), percentile(sealing, 50), opened)


def measure(rounds: int, tokens: int, progress: Callable[[str], None]) -> tuple[RedeemTimes, ...]:
    """Redeem tickets at an idle and at a busy producer, and return the times.

    Args:
        rounds: number of redemptions at a known peer. There are a twentieth as many pairs of handshakes.
        tokens: length of the prompt whose block table is in every answer, in tokens.
        progress: function that is called with a line of text for each producer.

    Raises:
        TransferError: the producer's process does not answer.
    """
    found = []
    for name in PRODUCERS:
        progress(f"redeeming tickets at a producer {name}")
        found.append(_measured(name, rounds, tokens))
    return tuple(found)


def _measured(name: str, rounds: int, tokens: int) -> RedeemTimes:
    new = max(5, rounds // _NEW_EVERY)
    tickets, keys = [new_ticket() for _ in range(2 * rounds + new)], random_keys()
    # In another order than one run, which a sealed grant would hold in a few bytes.
    table = [block ^ 63 for block in range(64, 64 - (-tokens // BLOCK_TOKENS))]
    grant = Grant.of(LeaseWord(0, 0, _RUN), tokens, [table])
    with _producer(tickets, tokens, keys, busy=name != PRODUCERS[0]) as address:
        handshakes, both = [], []
        for ticket in tickets[2 * rounds :]:
            with closing(_consumer(keys)) as one:
                handshakes.append(_met(one, address, None, tokens))
            with closing(_consumer(keys)) as one:
                both.append(_met(one, address, ticket, tokens))
        with closing(_consumer(keys)) as one:
            _met(one, address, None, tokens)
            known, sealed = [], []
            peer = one.known(address)
            key = b"" if peer is None else peer.seal_key
            for ticket, other in zip(tickets[: 2 * rounds : 2], tickets[1 : 2 * rounds : 2], strict=True):
                binding = SealBinding(address, other, tokens, _CONTENT)
                known.append(_redeemed(one, address, ticket, tokens))
                sealed.append(_redeemed(one, address, other, tokens, seal_grant(key, grant, binding)))
    return RedeemTimes(name, tuple(known), tuple(sealed), tuple(handshakes), tuple(both))


def _consumer(keys: Keys) -> ControlClient:
    return ControlClient(Facts("bench-consumer", _RUN, "kvferry bench", {}), lambda _: None, keys)


def _met(one: ControlClient, address: Address, ticket: bytes | None, tokens: int) -> float:
    """Make a handshake with a new peer, and redeem the ticket if it is not None. Return the seconds."""
    began = time.perf_counter()
    one.look_up(address)
    claim = None if ticket is None else one.redeem(address, ticket, tokens, _CONTENT)
    while not isinstance(one.look_up(address), PeerInfo):
        _check(began)
        time.sleep(0.0001)
    if claim is not None:
        _wait(one, claim)
    return time.perf_counter() - began


def _redeemed(one: ControlClient, address: Address, ticket: bytes, tokens: int, sealed: str = "") -> float:
    """Redeem a ticket, and release its lease. Return the seconds until its grant was known."""
    began = time.perf_counter()
    claim = one.redeem(address, ticket, tokens, _CONTENT, sealed=sealed)
    _wait(one, claim)
    seconds = time.perf_counter() - began
    while claim.asked:  # the producer handles one ticket at a time
        _check(began)
        time.sleep(0.0001)
    one.end(claim)
    return seconds


def _wait(one: ControlClient, claim: Redemption) -> None:
    answer = one.answer(claim, _PATIENCE_SECONDS)
    if not isinstance(answer, Redeemed):
        why = "it does not answer" if isinstance(answer, Pending) else answer.reason
        raise TransferError(f"the producer's process does not redeem a ticket: {why}")


def _check(began: float) -> None:
    if time.perf_counter() - began > _PATIENCE_SECONDS:
        raise TransferError(f"the producer's process does not answer within {_PATIENCE_SECONDS:g} s")


@contextmanager
def _producer(tickets: Sequence[bytes], tokens: int, keys: Keys, *, busy: bool) -> Iterator[Address]:
    """Run the producer's process while the block runs, and yield the address of its control channel.

    Args:
        tickets: tickets to publish.
        tokens: length of each prompt, in tokens.
        keys: CURVE keys of the control channel.
        busy: True to run a thread that computes in Python without a pause.
    """
    context = multiprocessing.get_context("spawn")
    pipe, theirs = context.Pipe()
    process = context.Process(
        target=_produce, args=(theirs, tickets, tokens, keys, busy), name="bench-redeem", daemon=True
    )
    process.start()
    theirs.close()
    try:
        yield (_HOST, pipe.recv())
    except EOFError as error:
        raise TransferError("the producer's process died") from error
    finally:
        pipe.close()
        process.join(_PATIENCE_SECONDS)


def _produce(pipe: Connection, tickets: Sequence[bytes], tokens: int, keys: Keys, busy: bool) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    rows = tuple(StoredField(field, 2, 2, (("content", 16),)) for field in ("k", "v"))
    cache = ModelCache("bench", (LayerCache(GroupKind.FULL, 0, rows),))
    (rank,) = lay_out(cache, EngineShape(1, (1,), BLOCK_TOKENS, "LBNHC", 2))
    facts = Facts("bench-producer", _RUN, "kvferry bench", {})
    server = ControlServer(_HOST, 0, PeerInfo(facts, (RankCard(rank, b"", 4096, 64, _RUN),)), keys)
    table = list(range(1, 1 + -(-tokens // BLOCK_TOKENS)))
    for number, ticket in enumerate(tickets):
        server.tickets.publish(
            ticket, str(number), tokens, _CONTENT, Grant.of(LeaseWord(0, 0, _RUN), tokens, [table])
        )
    ended = threading.Event()
    if busy:
        threading.Thread(target=_compute, args=(ended,), daemon=True).start()
    pipe.send(server.port)
    while not pipe.poll(0.005):  # like an engine between two steps
        server.events.clear()
    ended.set()
    server.close()


def _compute(ended: threading.Event) -> None:
    while not ended.is_set():
        sum(range(1000))
