"""Reads that are verified, over NIXL between two processes: a byte that changes on the way is noticed."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import numpy as np
import pytest

from kvferry.memory import copy_kernel
from kvferry.memory.copies import StagingCopies
from kvferry.planning.select import LoadSpan
from kvferry.planning.strategy import Strategy
from kvferry.transport.costs import TransferSettings
from kvferry.transport.verification import DIGEST_SECONDS, Verification
from support.clock import Clock
from support.engines import ranks
from support.oracle import expect
from support.waiting import wait_for
from transport.memory import scattered_tables
from transport.test_bytes import CASES, Case

UNEQUAL = ["everything differs", "TP 1 to 2", "block 24 to 16", "latent"]
ONE_LANE = TransferSettings(lanes=1, timed_read_bytes=0, verify=True)


class Read:
    """A read of a case's prompt by the last rank of its destination, which has not begun."""

    def __init__(self, world, case: Case, settings: TransferSettings, **options) -> None:
        self.span = LoadSpan(case.local_tokens, case.total, case.total)
        self.src_tables = scattered_tables(case.src, case.total, 1)
        self.dst_tables = scattered_tables(case.dst, case.total, 2)
        self.producer = world.shared_producer(case.src, case.families, self.src_tables)
        self.reader = world.reader(ranks(case.dst, case.families)[-1], settings=settings, **options)
        self.expected = expect(
            self.reader.rank,
            ranks(case.src, case.families),
            [self.span] * len(case.dst.groups),
            self.dst_tables,
            self.reader.before.copy(),
        )

    def submit(self, cards=None) -> None:
        self.reader.thread.connect("P", self.producer.cards if cards is None else cards)
        self.reader.submit("load", "P", self.span, self.src_tables, self.dst_tables)

    def result(self):
        return self.reader.result("load")

    def arrived(self) -> bool:
        """Whether all needed bytes are there."""
        must = self.expected.must
        return bool((self.reader.memory.bytes == self.expected.value)[must].all())

    def drawn(self, seed: int) -> int:
        """The offset of a needed byte that a READ changes."""
        e = self.expected
        return int(np.random.default_rng(seed).choice(np.flatnonzero(e.must & (e.value != e.before))))


@pytest.mark.parametrize(
    ("case", "strategy"),
    [
        pytest.param(CASES[name], strategy, id=f"{name}-{strategy}", marks=() if short else pytest.mark.long)
        for number, name in enumerate(UNEQUAL)
        for at, strategy in enumerate(Strategy)
        for short in [number in (0, at)]
    ],
)
def test_a_byte_that_changes_after_the_read_is_noticed_by_any_strategy(world, monkeypatch, case, strategy):
    read = Read(world, case, replace(ONE_LANE, strategy=strategy))
    at, digest, spoiled = read.drawn(len(str(case)) + len(strategy)), StagingCopies.digest, []

    def spoiling(copies, *cells):
        """Change the byte when the segment that it belongs to is digested."""
        memory, found = read.reader.memory.bytes, digest(copies, *cells)
        if spoiled or memory[at] != read.expected.value[at]:
            return found
        memory[at] ^= 0x10
        if (other := digest(copies, *cells)) != found:
            spoiled.append(at)
        else:
            memory[at] ^= 0x10
        return other

    monkeypatch.setattr(StagingCopies, "digest", spoiling)
    read.submit()
    result = read.result()
    assert spoiled
    assert result.failure is not None, f"byte {at}"
    assert "arrived with other bytes than the peer holds" in result.failure
    assert result.corrupt
    assert not result.peer_lost


@pytest.mark.parametrize("name", UNEQUAL)
def test_a_side_without_the_native_kernel_finds_the_same_digests(world, monkeypatch, name):
    assert copy_kernel.KERNEL is not None, "the other side has it"
    monkeypatch.setattr(copy_kernel, "KERNEL", None)
    read = Read(world, CASES[name], ONE_LANE)
    read.submit()
    assert read.result().failure is None
    assert read.arrived()


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize("name", UNEQUAL)
def test_without_verification_the_same_byte_passes(world, name, verify):
    read = Read(world, CASES[name], replace(ONE_LANE, strategy=Strategy.DIRECT, verify=verify))
    at = read.drawn(7)
    read.reader.agent.gate.clear()
    read.submit()
    # The data has arrived, and the lane does not see yet that the READ has ended.
    wait_for(read.arrived)
    memory = read.reader.memory.bytes
    memory[at] ^= 1
    read.reader.agent.gate.set()
    result = read.result()
    assert result.corrupt is verify
    assert (result.failure is None) is not verify
    memory[at] ^= 1
    assert read.arrived()


@pytest.mark.parametrize("ended", [True, False])
def test_bytes_that_the_peer_overwrites_are_a_lease_that_ended_if_it_has(world, ended):
    read = Read(world, CASES["everything differs"], replace(ONE_LANE, strategy=Strategy.DIRECT))
    ask = Verification.ask_ahead

    def late(self):
        """Ask for no digest before all data has landed."""
        return self._read.landed == len(self._read.cells) and ask(self)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Verification, "ask_ahead", late)
        read.reader.agent.gate.clear()
        read.submit()
        wait_for(read.arrived)
        if ended:
            read.producer.tell("end", [0])
        read.producer.tell("zero")
        read.reader.agent.gate.set()
        result = read.result()
    assert result.corrupt is not ended
    assert ("gave the blocks back before they were read" in result.failure) is ended


def test_a_peer_that_sends_no_digest_fails_the_load(world):
    clock = Clock()
    read = Read(world, CASES["TP 1 to 2"], replace(ONE_LANE, strategy=Strategy.DIRECT), clock=clock)
    (card,) = read.producer.cards
    read.submit([msgspec.structs.replace(card, outgoing=msgspec.structs.replace(card.outgoing, port=1))])

    def ended():
        clock.now += DIGEST_SECONDS / 4
        return read.reader.poll("load")

    result = wait_for(ended)
    assert result.failure == "the peer's worker sent no digest within 5 s"
    assert not result.corrupt


def test_a_peer_that_gathers_nothing_is_refused_in_words(world):
    read = Read(world, CASES["TP 1 to 2"], ONE_LANE)
    (card,) = read.producer.cards
    read.submit([msgspec.structs.replace(card, outgoing=None)])
    assert "its workers gather nothing; set staging_mib there" in read.result().failure
