"""Tiers of an engine on two machines: two network namespaces, real NIXL between them, real files."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvferry.tiers.files.admin import DirectoryAdmin
from support.machines import LOAD_SECONDS, Machines
from support.namespaces import Host, NotPermitted, hosts_on_a_network

TOKENS = 300
SOON = LOAD_SECONDS + 4.0
"""Seconds after which a request whose load has failed must be computed."""


@pytest.fixture(scope="module")
def hosts() -> Iterator[tuple[Host, Host]]:
    try:
        with hosts_on_a_network(2) as found:
            yield found
    except NotPermitted as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kv")


def tiers(directory: Path, capacity: str = "16MiB") -> list[dict[str, Any]]:
    return [
        {"type": "host", "capacity": capacity},
        {"type": "file", "path": str(directory), "capacity": "1GiB"},
    ]


@pytest.fixture(scope="module")
def engine(hosts: tuple[Host, Host], directory: Path) -> Iterator[Machines]:
    with Machines(hosts, tiers(directory, "1MiB")) as found:
        assert found.settle(), "the arena of the other machine is not there"
        yield found


def test_each_machine_keeps_its_share_and_files_have_whole_chunks(
    engine: Machines, hosts: tuple[Host, Host], directory: Path
) -> None:
    assert engine.serve(1, TOKENS) == ({}, 0, pytest.approx(0, abs=1))
    assert engine.settle()
    counts = engine.counts()
    assert counts["put stored"] == counts["copied"] > 5
    stored = sum(entry.size for entry in DirectoryAdmin(directory).entries() if entry.kind == "chunk")

    before = [host.received_bytes() for host in hosts]
    assert engine.serve(1, TOKENS)[:2] == ({"host": TOKENS}, 0)
    assert engine.settle()
    moved = [host.received_bytes() - was for host, was in zip(hosts, before, strict=True)]
    assert max(moved) < stored // 20, "a load from host memory moves nothing between machines"

    engine.evict()
    assert engine.in_host() == 0
    # Else slots would still have the right bytes.
    for number in range(2):
        engine.spoil(number)
    before = hosts[1].received_bytes()
    assert engine.serve(1, TOKENS)[:2] == ({"file": TOKENS}, 0)
    assert engine.settle()
    assert hosts[1].received_bytes() - before > stored // 4, "the other machine got its share another way"
    assert engine.serve(1, TOKENS)[:2] == ({"host": TOKENS}, 0)


def test_spoiled_share_of_the_other_machine_is_what_its_rank_loads(engine: Machines) -> None:
    engine.serve(9, TOKENS)
    assert engine.settle()
    engine.spoil(1)
    found, wrong, _ = engine.serve(9, TOKENS)
    assert found == {"host": TOKENS}
    assert wrong > 10_000, "the bytes were not looked at, or came from elsewhere"
    engine.evict()


def test_chunks_are_evicted_on_both_machines_at_once(engine: Machines) -> None:
    for seed in range(10, 30):
        assert engine.serve(seed, TOKENS)[1] == 0
        assert engine.settle()
        engine.check()
    sources = set()
    for seed in range(10, 30):
        found, wrong, _ = engine.serve(seed, TOKENS)
        assert sum(found.values()) == TOKENS
        assert wrong == 0
        sources |= found.keys()
        engine.check()
    assert sources >= {"file"}, "host memory was never full"
    assert engine.settle()
    assert engine.lost() == ""


def test_engines_of_other_sizes_read_what_the_machines_wrote_and_the_other_way_round(
    engine: Machines, hosts: tuple[Host, Host], directory: Path
) -> None:
    engine.serve(40, TOKENS)
    assert engine.settle()
    with Machines(hosts[:1], tiers(directory)) as one:
        assert one.serve(40, TOKENS)[:2] == ({"file": TOKENS}, 0)
        one.serve(41, TOKENS)
        assert one.settle()
    time.sleep(2.5)  # until the directory is listed again
    assert engine.serve(41, TOKENS)[:2] == ({"file": TOKENS}, 0)


@pytest.mark.long
def test_pipeline_stages_of_different_sizes_on_two_machines_keep_tiers(
    hosts: tuple[Host, Host], tmp_path: Path
) -> None:
    """The second has one layer, of full attention, and none with a window."""
    with Machines(hosts, tiers(tmp_path), stages=(3, 1)) as engine:
        assert engine.settle()
        engine.serve(1, TOKENS)
        assert engine.settle()
        assert engine.serve(1, TOKENS)[:2] == ({"host": TOKENS}, 0)
        engine.evict()
        for number in range(2):
            engine.spoil(number)
        assert engine.serve(1, TOKENS)[:2] == ({"file": TOKENS}, 0)
    with Machines(hosts, tiers(tmp_path)) as engine:
        assert engine.settle()
        assert engine.serve(1, TOKENS)[:2] == ({"file": TOKENS}, 0)


# -- one machine ends, at each step -----------------------------------------------------------------------


def kill_before_a_store(engine: Machines) -> None:
    engine.kill()
    engine.serve(50, TOKENS)


def kill_before_a_write(engine: Machines) -> None:
    """Its share is copied, and no byte of it has been read."""
    engine.hold_transfers()
    engine.serve(50, TOKENS)
    assert not engine.settle(0.5)
    assert engine.in_host() > 0
    engine.kill()
    engine.release_transfers()


def kill_during_a_write(engine: Machines) -> None:
    engine.hold_transfers()
    engine.serve(50, TOKENS)
    assert not engine.settle(0.5)
    engine.stop()
    engine.be_patient(0.2)
    engine.release_transfers()
    engine.settle(0.5)
    engine.kill()


def kill_before_a_load_from_host_memory(engine: Machines) -> None:
    engine.serve(50, TOKENS)
    assert engine.settle()
    engine.kill()
    assert engine.in_host() > 0


def kill_before_a_load_from_files(engine: Machines) -> None:
    engine.serve(50, TOKENS)
    assert engine.settle()
    engine.evict()
    engine.kill()
    found, _, seconds = engine.serve(50, TOKENS)
    assert found == {}
    assert seconds < SOON


def kill_during_a_load_from_files(engine: Machines) -> None:
    engine.serve(50, TOKENS)
    assert engine.settle()
    engine.evict()
    engine.stop()
    engine.be_patient(0.2)
    serving = engine.begin("serve", 50, TOKENS)
    time.sleep(0.5)
    engine.kill()
    found, _, seconds = serving()
    assert found == {}
    assert seconds < SOON


def hang_during_a_load_from_files(engine: Machines) -> None:
    """The machine neither answers nor ends."""
    engine.serve(50, TOKENS)
    assert engine.settle()
    engine.evict()
    engine.stop()
    engine.be_patient(0.2)
    found, _, seconds = engine.serve(50, TOKENS)
    assert found == {}
    assert seconds < SOON


def kill_the_scheduler_during_a_write(engine: Machines) -> None:
    engine.hold_transfers()
    engine.serve(50, TOKENS)
    engine.settle(0.5)
    engine.kill_lead()


def kill_the_scheduler_during_a_load(engine: Machines) -> None:
    engine.serve(50, TOKENS)
    assert engine.settle()
    engine.evict()
    engine.stop()
    engine.begin("serve", 50, TOKENS)
    time.sleep(0.5)
    engine.kill_lead()


BEFORE_IT_IS_STORED = (
    kill_before_a_store,
    kill_before_a_write,
    kill_during_a_write,
    kill_the_scheduler_during_a_write,
)
AFTERWARDS = (
    kill_before_a_load_from_host_memory,
    kill_before_a_load_from_files,
    kill_during_a_load_from_files,
    hang_during_a_load_from_files,
    kill_the_scheduler_during_a_load,
)


@pytest.mark.long
@pytest.mark.parametrize("lose", [*BEFORE_IT_IS_STORED, *AFTERWARDS], ids=lambda one: one.__name__)
def test_loss_of_a_machine_costs_hits_only(
    lose: Callable[[Machines], None], hosts: tuple[Host, Host], tmp_path: Path
) -> None:
    with Machines(hosts, tiers(tmp_path)) as engine:
        assert engine.settle()
        lose(engine)
        if engine.lead.is_alive():
            for seed in (50, 51, 50):
                found, wrong, seconds = engine.serve(seed, TOKENS)
                # The ranks that are left have their shares in host memory, until a transfer fails.
                assert found.keys() <= {"host"}
                assert wrong == 0
                assert seconds < SOON
            engine.check()
    # What is started anew finds a chunk whole, or not at all.
    again = hosts if lose is kill_during_a_load_from_files else hosts[:1]
    with Machines(again, tiers(tmp_path)) as engine:
        assert engine.settle()
        expected = {"file": TOKENS} if lose in AFTERWARDS else {}
        assert engine.serve(50, TOKENS)[:2] == (expected, 0)
        assert engine.serve(51, TOKENS)[:2] == ({}, 0)


def test_a_lost_machine_is_said_once_and_a_reset_does_not_bring_it_back(
    hosts: tuple[Host, Host], tmp_path: Path
) -> None:
    with Machines(hosts, tiers(tmp_path)) as engine:
        assert engine.settle()
        kill_before_a_load_from_files(engine)
        assert engine.lost().startswith("the machine of rank TP1 PP0 cannot be reached")
        before = engine.stores()
        for seed in (50, 51):
            assert engine.serve(seed, TOKENS)[:2] == ({}, 0)
            engine.reset()
        assert engine.stores() == before > 0, "a slot is used to which bytes may still be on their way"
        said = f"tiers: {engine.lost()}; this engine uses no tier from now on: start it anew"
        assert engine.errors() == [said]
