"""Valid messages of both channels, from which odd ones are made."""

from __future__ import annotations

import numpy as np
from msgspec import structs

from kvferry.planning.cell_copy import PoolCopies
from kvferry.planning.strided_copy import Loop, StridedCopy
from kvferry.transport import gather_client as gather_messages, messages
from kvferry.transport.gather_client import (
    AnnounceRoutes,
    Digested,
    Done,
    Gather,
    Gathered,
    GatherRoute,
    NotGathered,
)
from kvferry.transport.lease import LeaseWord
from kvferry.transport.messages import (
    PROTOCOL,
    AskTurn,
    Claim,
    Hello,
    KeptTurn,
    PeerInfo,
    Refused,
    Turns,
)
from kvferry.transport.redeem import Grant, NotRedeemed, PromptContent, Redeem, Redeemed, Unchanged
from transport.cards import cards, facts, ticket

CHUNK_TOKENS = 256
KEYS = bytes(range(32)), bytes(range(32, 64))
CONTENT, TOKENS = PromptContent("d" * 32), 4
GRANT = Grant.of(LeaseWord(1, 2, 1), TOKENS, [[1, 2, 3]])
LEASES = ("a", "b", "c")
"""Leases of a producer, whose tickets are in the messages; all are for the same prompt."""
TURNS = ("t1", "t2")
"""Leases of its turns, which begin with the same chunks."""


def requests() -> list[bytes]:
    """Return what consumers say on the control channel."""
    said = facts("D", 9)
    keeper = structs.replace(said, keeps_turns=("127.0.0.1", 9), must_agree={"rope": {"theta": "1"}})
    a, b, c, t, unknown, others = map(ticket, ("a", "b", "c", "t1", "unknown", "honest"))
    other = PromptContent("e" * 32, "i" * 32, "adapter", "s" * 32)
    near = [structs.replace(CONTENT, **{name: getattr(other, name)}) for name in ("items", "adapter", "salt")]
    found = [
        Hello(PROTOCOL, said),
        Hello(PROTOCOL, keeper),
        *(Redeem(1, run, one, TOKENS, CONTENT) for run in (7, 8) for one in (a, b, c)),
        *(Redeem(2, 7, one, TOKENS, CONTENT) for one in (t, unknown)),
        *(Redeem(3, 7, a, TOKENS, content) for content in near),
        *(Redeem(3, 7, one, TOKENS, other) for one in (a, others)),
        Redeem(4, 7, a, TOKENS + 1, CONTENT),
        Claim(7, [a, b]),
        Claim(8, [a, a, c, unknown]),
        Claim(7, [t, others, ticket("t2")]),
        Claim(7, [a], released=True),
        Claim(8, [a, a], released=True),
        Claim(7, [a, b, t, others], released=True),
        Claim(8, [b, c, unknown], released=True),
        AskTurn(1, CHUNK_TOKENS, list(KEYS)),
        AskTurn(2, CHUNK_TOKENS, [KEYS[0], KEYS[0]]),
        AskTurn(3, CHUNK_TOKENS // 2, list(KEYS)),
        AskTurn(4, CHUNK_TOKENS, [KEYS[1]]),
    ]
    return [messages.encode(one) for one in found]


def replies() -> list[bytes]:
    """Return what producers answer."""
    turn = KeptTurn("P", ticket("t1"), structs.replace(GRANT, tokens=40), 1, 1, [5, 6])
    found = [
        Refused(["weights differ"]),
        PeerInfo(facts(), cards()),
        PeerInfo(facts(), cards(2), bytes(32)),
        Turns(1, [turn]),
        Redeemed(1, structs.replace(GRANT, tokens=4)),
        Redeemed(1, structs.replace(GRANT, tokens=4), 3),
        Unchanged(1),
        NotRedeemed(1, "no such ticket", unknown=True),
    ]
    return [messages.encode(one) for one in found]


def gather_requests(pool: int, stride: int, blocks: int) -> list[bytes]:
    """Return what readers say to a worker with a pool at this address."""
    copies = (StridedCopy(16, 8, 4, (Loop(3, 100, 12),)).at(pool, 0),)
    route = GatherRoute(stride, blocks, 64, (PoolCopies((0, 1000), copies),))
    ids = np.array([1, 2, 3], np.int32).tobytes()
    found = [
        AnnounceRoutes(PROTOCOL, [route]),
        AnnounceRoutes(PROTOCOL, [route, route]),
        Gather(1, 0, 0, 0, ids, bytes(len(ids))),
        Gather(2, 0, 1, 0, ids, np.array([1, 0, 1], np.int32).tobytes()),
        Gather(3, 0, 0, 0, ids, bytes(len(ids)), digest=True),
        Done(1),
        Done(2),
    ]
    return [gather_messages.encode(one) for one in found]


def gather_replies() -> list[bytes]:
    """Return what workers answer."""
    found = [
        Gathered(1, 0, 4, 0),
        Digested(4, bytes(16)),
        NotGathered(2, "no room"),
        NotGathered(3, "who are you?", unknown=True),
    ]
    return [gather_messages.encode(one) for one in found]
