"""A fake engine with a producer, and the control channel on which other engines ask it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from kvferry.connector.config import ConnectorConfig
from kvferry.connector.content import TurnNames
from kvferry.connector.messages import LEASE_SLOTS, StepOrders, StepReports
from kvferry.connector.peers.producer import Producer
from kvferry.transport.redeem import TicketBook
from kvferry.transport.turns import TurnIndex
from support.engine_info import FULL_GROUP
from support.fake_engine import FakeEngine, PartialHalf

LEASE_SECONDS = 30.0


def played_channel() -> Any:
    """Return a control server without a socket: what a producer shares with it."""
    return SimpleNamespace(port=7, tickets=TicketBook(), turns=TurnIndex(), seal_key=b"k" * 32)


def producing(
    groups: Any = (FULL_GROUP,),
    *,
    blocks: int = 1000,
    workers: int = 1,
    lease_slots: int = LEASE_SLOTS,
    facts: dict[str, Any] | None = None,
    **settings: Any,
) -> FakeEngine:
    """Return an engine with a producer. `channel` has the producer's tickets and kept turns."""
    engine = FakeEngine(groups, blocks=blocks, workers=workers, **(facts or {}))
    engine.names = TurnNames(engine.adapters)
    engine.channel = played_channel()
    engine.producer = Producer(
        engine.facts,
        ConnectorConfig(lease_seconds=LEASE_SECONDS, **settings),
        incarnation=1,
        events=engine.events,
        names=engine.names,
        adapters=engine.adapters,
        channel=engine.channel,
        pool=engine.pool,
        workers=workers,
        clock=engine.clock,
        lease_slots=lease_slots,
    )
    engine.half = PartialHalf(producer=engine.producer)
    return engine


def hear(engine: FakeEngine, *messages: Any) -> StepOrders:
    """Run a step without requests after these messages of peers; return its orders."""
    engine.half.messages.extend(messages)
    return engine.step()


def confirm(engine: FakeEngine, name: str, workers: int = 1) -> None:
    """Let so many workers report that they have raised the word of a lease."""
    engine.half.take_reports(StepReports(raised={name: workers}))
