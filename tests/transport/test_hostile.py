"""Peers that lie in what NIXL loads, and strangers at its ports: they cost themselves, and nobody else."""

from __future__ import annotations

import errno
import os
import socket
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from kvferry.geometry import Region
from kvferry.tools.doctor.ports import listening_ports
from kvferry.transport.agent import VARIABLE, addresses
from kvferry.transport.messages import Outgoing
from kvferry.transport.metadata_sandbox import MetadataSandbox
from kvferry.transport.metadata_validation import MetadataValidator
from support.metadata import mutations, value
from support.waiting import wait_for
from transport import large
from transport.test_faults import well

SEED = 14
KINDS = ("ended the process", "did not come to an end", "cannot use", "harmless", "transport metadata")


class Validator(MetadataValidator):
    """Knows the process ids of its child processes, and gives a verdict at once."""

    def __init__(self, **options) -> None:
        self.pids: list[int] = []
        super().__init__(self._child, **options)

    def _child(self) -> MetadataSandbox:
        child = MetadataSandbox("127.0.0.1")
        self.pids.append(child.pid)
        return child

    def verdict(self, card) -> str:
        return self.validate([card]).result(60)


@pytest.fixture
def validator():
    return Validator()


@pytest.fixture
def reader(world, validator):
    return world.reader(large.RANK, validator=validator)


def is_running(pid: int) -> bool:
    """Return whether a process runs, and is not one that has ended and waits for its parent."""
    try:
        return " Z " not in Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False


def spoiled(card, **changes):
    return msgspec.structs.replace(card, **changes)


def versioned(agent: bytes) -> bytes:
    """Metadata with an address of a version that UCX has not: it asserts that there is none."""
    at, _ = value(agent, b"c", value(agent, b"Conns")[1])
    return agent[:at] + b"\x0d" + agent[at + 1 :]


def test_metadata_that_ends_a_process_ends_the_child_alone(world, reader, validator):
    (card,) = world.shared_producer(large.SPEC, large.FAMILIES).cards
    assert validator.verdict(card) == ""
    says = validator.verdict(spoiled(card, agent=versioned(card.agent)))
    assert says == "its transport metadata ended the process that tried it (signal 6)"
    reader.thread.connect("liar", [spoiled(card, agent=versioned(card.agent))])
    reader.submit("load", "liar", large.span(1), large.FORWARD, large.FORWARD)
    result = reader.result("load")
    assert (result.failure, result.peer_lost) == (f"peer liar cannot be read from: {says}", True)
    assert reader.agent.held["peers"] == 0, "nothing of it was loaded here"
    well(world, reader)


@pytest.mark.parametrize("number", [20, pytest.param(200, marks=pytest.mark.long)])
def test_a_worker_survives_any_damage_to_metadata(world, number):
    reader = world.reader(large.RANK, validator=Validator(try_seconds=1.0))
    (card,) = world.shared_producer(large.SPEC, large.FAMILIES, seed=50).cards
    became = Counter()
    for what, agent in mutations(card.agent, number, SEED):
        bad = spoiled(card, agent=agent)
        reader.thread.connect(what, [bad])
        reader.submit(what, what, large.span(1), large.FORWARD, large.FORWARD)
        kind = reader.result(what).failure or "harmless"
        became[next((known for known in KINDS if known in kind), kind)] += 1
        reader.thread.disconnect(what)
    assert became["ended the process"] * 40 > number, became
    assert became["transport metadata"] * 10 > number, became
    assert (large.pages(reader.memory.bytes)[2:] == large.pages(reader.before)[2:]).all()
    well(world, reader)


def lies(card):
    """Cards that say something else than the memory behind them."""
    (region,) = card.geometry.regions
    group = card.geometry.groups[0]
    layer = group.layers[0]

    def told(blocks=card.geometry.num_blocks, of_region=(), **of_layer):
        geometry = replace(
            card.geometry,
            num_blocks=blocks,
            groups=(replace(group, layers=(replace(layer, **of_layer),)),),
            regions=(replace(region, **dict(of_region)),),
        )
        return spoiled(card, geometry=geometry)

    yield "pages off by one", told(address=layer.address + large.PAGE)
    yield "pages off by a byte", told(address=layer.address + 1)
    yield "pages before the region", told(address=layer.address - large.PAGE)
    yield "a huge stride", told(block_stride=1 << 61)
    yield "a stride past the region", told(block_stride=layer.block_stride + 4096)
    yield "many blocks", told(blocks=1 << 30)
    yield "a larger region", told(1 << 27, {"length": large.PAGE << 27})
    yield "a region of a GPU", told(of_region={"memory": "VRAM"})
    yield "another device", told(of_region={"device": 3})
    yield "words past their end", spoiled(card, words=card.words + 1)
    yield "words elsewhere", spoiled(card, words_address=region.address)
    yield "words of another run", spoiled(card, incarnation=card.incarnation + 1)
    area = card.outgoing or Outgoing("127.0.0.1", 1, region.address, region.length, 1)
    yield "an area past its end", spoiled(card, outgoing=spoiled(area, bytes=area.bytes + 4096))
    yield "an area elsewhere", spoiled(card, outgoing=spoiled(area, address=1 << 46))
    yield "an area in the words", spoiled(card, outgoing=spoiled(area, address=card.words_address))


def test_a_card_that_lies_costs_that_peer_and_writes_nothing(world, reader, validator):
    (card,) = world.shared_producer(large.SPEC, large.FAMILIES, seed=50).cards
    for what, lie in lies(card):
        reader.thread.connect(what, [lie])
        reader.submit(what, what, large.span(1), large.FORWARD, large.FORWARD)
        assert reader.result(what).failure is not None, what
        reader.thread.disconnect(what)
    says = validator.verdict(spoiled(card, incarnation=card.incarnation + 1))
    assert "memory of another process, or of another run" in says
    assert (large.pages(reader.memory.bytes)[2:] == large.pages(reader.before)[2:]).all()
    assert (large.pages(reader.memory.bytes)[0] == large.pages(reader.before)[0]).all()
    well(world, reader)


def test_registered_memory_that_does_not_exist_is_refused_before_anything_is_read(world, reader, validator):
    """A peer whose metadata and card agree on memory that it does not have."""
    (card,) = world.shared_producer(large.SPEC, large.FAMILIES, seed=50).cards
    (region,) = card.geometry.regions
    nowhere = 1 << 44
    old, new = (address.to_bytes(8, "little") for address in (region.address, nowhere))
    assert old in card.agent
    layer = card.geometry.groups[0].layers[0]
    group = replace(card.geometry.groups[0], layers=(replace(layer, address=nowhere),))
    geometry = replace(card.geometry, groups=(group,), regions=(Region(nowhere, region.length),))
    says = validator.verdict(spoiled(card, agent=card.agent.replace(old, new), geometry=geometry))
    assert "cannot be read" in says or "cannot use" in says, says
    well(world, reader)


def test_the_child_ends_when_its_worker_closes(world, reader, validator):
    (card,) = world.shared_producer(large.SPEC, large.FAMILIES).cards
    assert validator.verdict(card) == ""
    assert is_running(validator.pids[-1])
    reader.thread.close()
    assert not is_running(validator.pids[-1])


def test_the_child_ends_with_a_worker_that_is_killed():
    program = """
import os
import signal
import nixl
from kvferry.transport.metadata_sandbox import MetadataSandbox
trial = MetadataSandbox("127.0.0.1")
print(trial.pid, repr(trial.wait_ready()), flush=True)
os.kill(trial.pid, signal.SIGSTOP)
os.kill(os.getpid(), 9)
"""
    command = [sys.executable, "-c", program]
    said = subprocess.run(command, check=False, capture_output=True, text=True, timeout=100)
    child, ready = said.stdout.split()
    assert ready == "''"
    wait_for(lambda: not is_running(int(child)))


def test_an_engine_on_loopback_is_not_reached_from_outside_the_machine(world, reader, validator, monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    producer = well(world, reader, "P", world.producer)
    for pid in (producer.process.pid, os.getpid(), validator.pids[-1]):
        found = listening_ports(pid)
        assert found, "UCX listens"
        assert {port.address for port in found} == {"127.0.0.1"}, found
    outside = [str(one) for _, one in addresses() if one.version == 4 and not one.is_loopback]
    assert outside, "this machine has no address but loopback"
    for port in listening_ports(producer.process.pid):
        for address in outside:
            with socket.socket() as sock:
                assert sock.connect_ex((address, port.number)) == errno.ECONNREFUSED
    well(world, reader, "P")
