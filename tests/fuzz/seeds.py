"""Valid messages of both channels, from which odd ones are made."""

from __future__ import annotations

import numpy as np
from msgspec import structs

from kvferry.planning.nest import Loop, Nest
from kvferry.planning.plane import PoolNests
from kvferry.transport import gather_messages, messages
from kvferry.transport.gather_messages import Done, Gather, Gathered, GatherRoute, Introduce, NotGathered
from kvferry.transport.messages import (
    PROTOCOL,
    Accepted,
    AskRanks,
    AskTurn,
    Drop,
    Heartbeat,
    Hello,
    KeptTurn,
    Ranks,
    Refused,
    Release,
    Turns,
)
from kvferry.transport.redeem import Grant, NotRedeemed, PromptContent, Redeem, Redeemed
from transport.cards import cards, facts, ticket

KEY = bytes(range(32))
CONTENT = PromptContent("d" * 32)
GRANT = Grant.of(1, 2, [[1, 2, 3]])


def requests() -> list[bytes]:
    """Return what consumers say on the control channel."""
    said = facts("D", 9)
    keeper = structs.replace(said, keeps_turns=("127.0.0.1", 9), must_agree={"rope": {"theta": "1"}})
    found = [
        Hello(PROTOCOL, said),
        Hello(PROTOCOL, keeper),
        AskRanks(PROTOCOL, said),
        Redeem(1, 7, ticket("a"), 4, CONTENT),
        Heartbeat(7, [ticket("a"), ticket("b")]),
        Release(7, [ticket("a")]),
        Drop([ticket("b")]),
        AskTurn(1, 256, [KEY, KEY[::-1]]),
    ]
    return [messages.encode(one) for one in found]


def replies() -> list[bytes]:
    """Return what producers answer."""
    turn = KeptTurn("P", 1, ticket("t"), GRANT, 40, 1, 1, [5, 6])
    found = [
        Accepted(facts()),
        Refused(["weights differ"]),
        Ranks(list(cards())),
        Ranks(list(cards(2))),
        Turns(1, [turn]),
        Redeemed(1, 1, GRANT),
        NotRedeemed(1, 1, "no such ticket"),
    ]
    return [messages.encode(one) for one in found]


def gather_requests(pool: int, stride: int, blocks: int) -> list[bytes]:
    """Return what readers say to a worker with a pool at this address."""
    nests = (Nest(16, 8, 4, (Loop(3, 100, 12),)).at(pool, 0),)
    route = GatherRoute(stride, blocks, 64, (PoolNests((0, 1000), nests),))
    ids = np.array([1, 2, 3], np.int32).tobytes()
    found = [
        Introduce(PROTOCOL, [route]),
        Introduce(PROTOCOL, [route, route]),
        Gather(1, 0, 0, 0, ids, 0),
        Gather(2, 0, 1, 0, ids, 1),
        Done(1),
        Done(2),
    ]
    return [gather_messages.encode(one) for one in found]


def gather_replies() -> list[bytes]:
    """Return what workers answer."""
    found = [Gathered(1, 0, 4, 0), NotGathered(2, "no room"), NotGathered(3, "who are you?", unknown=True)]
    return [gather_messages.encode(one) for one in found]
