"""The arenas of an engine on two machines, as the scheduler learns of them."""

from __future__ import annotations

from collections.abc import Iterator
from unittest import mock

import pytest

from kvferry.common.errors import TransferError
from kvferry.connector.messages import StepReports
from kvferry.connector.tiers import arenas as module
from kvferry.connector.tiers.arenas import Arenas
from kvferry.geometry import Region
from kvferry.geometry.canonical import canonical_form_of, share_of
from kvferry.memory.shared_memory import SharedFile
from kvferry.tiers.shares.arena import FarArena
from kvferry.tools.models.layout import EngineShape, lay_out
from support.models import attention, model

SIZE = 1 << 20
HANDLE = SharedFile(1, 2, "0" * 32, SIZE)


@pytest.fixture
def exchange(monkeypatch: pytest.MonkeyPatch) -> mock.Mock:
    found = mock.Mock(lost="")
    monkeypatch.setattr(module, "ShareExchange", mock.Mock(return_value=found))
    return found


@pytest.fixture
def arenas(exchange: mock.Mock) -> Iterator[Arenas]:
    found = made_up(buffers=6)
    assert found.exchange is exchange
    yield found
    found.close()


def made_up(buffers: int) -> Arenas:
    """Return the arenas of three machines, of which the second has two ranks."""
    ranks = lay_out(model(attention()), EngineShape(4, (1,), 16, "LBHNC", 100))
    machines = [ranks[:1], ranks[1:3], ranks[3:]]
    whole = canonical_form_of(ranks, 64)
    shares = [share_of(whole, machine) for machine in machines]
    return Arenas(
        SIZE, machines, whole, shares, buffers=buffers, host="10.0.0.7", ports=None, wake=lambda: None
    )


def arena(size: int = SIZE) -> FarArena:
    return FarArena(HANDLE, Region(1 << 40, size), b"agent")


def test_chunks_wait_for_the_arenas_of_all_machines(arenas: Arenas, exchange: mock.Mock) -> None:
    assert arenas.can_attach
    first = arenas.cards.pop()
    assert [one.arena for one in first.machines] == [arenas.own.handle, None, None]
    assert (arenas.busy, arenas.ready_bytes()) == (True, 0)
    arenas.take_reports(StepReports(arenas={2: arena(SIZE // 2)}))
    assert (arenas.busy, arenas.ready_bytes(), arenas.cards) == (True, 0, [])
    exchange.connect.assert_not_called()
    arenas.take_reports(StepReports(arenas={1: arena()}))
    exchange.connect.assert_called_once_with([arena(), arena(SIZE // 2)])
    assert (arenas.busy, arenas.ready_bytes()) == (True, 0), "the other ranks do not know the arenas yet"
    second = arenas.cards.pop()
    assert [one.arena for one in second.machines] == [arenas.own.handle, HANDLE, HANDLE]
    assert (arenas.busy, arenas.ready_bytes()) == (False, SIZE // 2), "a slot is in all arenas"


def test_a_machine_without_memory_is_named(arenas: Arenas) -> None:
    arenas.cards.pop()
    arenas.take_reports(StepReports(arenas={1: "host tier: too large"}))
    assert arenas.lost == "the machine of rank TP1 PP0 has no host memory for tiers: host tier: too large"
    assert not arenas.busy, "an idle engine would run steps for ever"
    arenas.take_reports(StepReports(arenas={2: arena()}))
    assert (arenas.cards, arenas.ready_bytes()) == ([], 0)


def test_metadata_that_nixl_cannot_use_loses_the_arenas(arenas: Arenas, exchange: mock.Mock) -> None:
    arenas.cards.pop()
    exchange.connect.side_effect = TransferError("no")
    arenas.take_reports(StepReports(arenas={1: arena(), 2: arena()}))
    assert arenas.lost == "host memory of other machines cannot be used: no"
    assert arenas.cards == []


def test_a_failed_transfer_loses_the_arenas(arenas: Arenas, exchange: mock.Mock) -> None:
    assert arenas.lost == ""
    exchange.lost = "the machine of rank TP1 PP0 cannot be reached"
    assert arenas.lost == exchange.lost


def test_reports_of_several_ranks_are_merged() -> None:
    reports = StepReports(arenas={1: arena()})
    reports.add(StepReports(arenas={2: "why"}))
    assert reports.arenas == {1: arena(), 2: "why"}
    assert bool(StepReports(arenas={1: "why"}))
    assert not StepReports()


def test_host_memory_alone_needs_no_transfers_between_machines() -> None:
    found = made_up(buffers=0)
    found.cards.pop()
    found.take_reports(StepReports(arenas={1: arena(), 2: arena()}))
    assert (found.exchange, found.lost, len(found.cards)) == (None, "", 1)
    found.close()
