"""Every request of an operation of the object tier is refused, not answered, or cut short, done or not.

The requests of an operation are counted first. Then it is repeated with a fault at the first, at the second,
and so on, once or as often as it is repeated. The server is a real one.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count

import pytest

from benchmarks.object_server import BUCKET
from kvferry.tiers.names import GetOutcome, PutOutcome
from kvferry.tiers.objects.client import BucketClient
from kvferry.tiers.objects.tier import ObjectTier
from kvferry.tiers.paths import chunk_name
from support.chunk_files import key
from support.object_server import Server
from support.objects import get, known, open_objects, put
from support.request_faults import Between, Fault, How, between
from support.stores import FILE_BYTES, NAMESPACE

pytestmark = pytest.mark.slow

KEPT = (1, 2)
SPOILT = 2
REFUSALS = (
    ("500 Oops", "InternalError"),
    ("503 Slow Down", "SlowDown"),
    ("403 Forbidden", "AccessDenied"),
    ("404 Not Found", "NoSuchKey"),
    ("412 Precondition Failed", "PreconditionFailed"),
)
_PLACES = count()


@dataclass(frozen=True)
class Operation:
    """What is done while a request goes wrong.

    Attributes:
        name: for people.
        do: the operation; its outcome.
        spoils: chunk 2 is damaged before.
        opens: the store is opened by it.
    """

    name: str
    do: Callable[[ObjectTier], object]
    spoils: bool = False
    opens: bool = False

    def __str__(self) -> str:
        return self.name


OPERATIONS = (
    Operation("open", len, opens=True),
    Operation("store", lambda store: put(store, 3)),
    Operation("store what is there", lambda store: put(store, 4)),
    Operation("fetch", lambda store: get(store, 1)),
    Operation("fetch what is damaged", lambda store: get(store, SPOILT), spoils=True),
    Operation("fetch what is not there", lambda store: get(store, 9)),
    Operation("refresh", lambda store: store.refresh()),
)


class Case:
    """An operation at a place of its own."""

    def __init__(self, operation: Operation, way: Between, server: Server) -> None:
        self.operation, self.way, self.server = operation, way, server
        self.url = f"s3://{BUCKET}/every-{next(_PLACES)}"
        self.bucket = BucketClient(self.url, server.options, 40.0)
        first = open_objects(self.url, server, timeout_seconds=40.0)
        assert [put(first, number) for number in KEPT] == [PutOutcome.STORED] * 2
        way.start(Fault())
        self.store = None if operation.opens else self.opened()
        assert put(first, 4) is PutOutcome.STORED
        if operation.spoils:
            name = chunk_name(NAMESPACE.digest, key(SPOILT))
            data = bytearray(b"".join(self.bucket.get(name).pieces))
            data[5000] ^= 1
            self.bucket.put(name, [data])

    def opened(self) -> ObjectTier:
        return open_objects(self.url, self.way.server, timeout_seconds=40.0, pause_seconds=0.0)

    def work(self, fault: Fault) -> str:
        """Do it, and go on with the same store when nothing fails any more; the outcome."""
        self.way.start(fault)
        store = self.store or self.opened()
        done = str(self.operation.do(store))
        assert bool(self.way.hit) is bool(fault.at), "the fault did not happen"
        lines = self.way.lines
        self.way.start(Fault())
        made = sum(store.stats.puts.values()), sum(store.stats.gets.values())
        assert made == (self.operation.name.startswith("store"), self.operation.name.startswith("fetch"))
        store.refresh()
        assert put(store, 7) is PutOutcome.STORED, "stores do not go on"
        assert get(store, 7) is GetOutcome.HIT
        assert get(store, 1) is GetOutcome.HIT, "a good chunk is not found any more"
        assert known(store, 1) == [True]
        self.lines, self.knows = lines, known(store, 3)
        return done

    def judge(self, done: str, fault: Fault) -> None:
        """What others find."""
        store = open_objects(self.url, self.server, timeout_seconds=40.0)
        found = {number: get(store, number) for number in (1, 2, 3, 4)}
        lost = [number for number in (1, 2, 4) if found[number] is not GetOutcome.HIT]
        assert lost == ([SPOILT] if self.operation.spoils else []), "a good chunk was lost"
        # A page with status 200 says that it is stored; the next listing has shown that it is not.
        if done == str(PutOutcome.STORED) and self.operation.name == "store" and fault.how is not How.PAGE:
            assert found[3] is GetOutcome.HIT, "it was said to be stored, and is not there"
        assert self.knows == [found[3] is GetOutcome.HIT]
        objects = [one for page in self.bucket.list() for one in page]
        bad = [one.path for one in objects if one.path.startswith("quarantine/")]
        # Twice if the first time it was copied, and an error reported.
        assert len(bad) <= 2 * self.operation.spoils, "a good chunk was moved aside"
        assert all(key(SPOILT).hex() in path for path in bad)
        assert {one.size for one in objects if one.path.endswith(".kv")} == {FILE_BYTES}


@pytest.fixture(scope="module")
def way(s3_server) -> Iterator[Between]:
    with between(s3_server) as found:
        yield found


def faults(requests: int) -> list[Fault]:
    """What is tried at each of so many requests."""
    found = []
    for at in range(1, requests + 1):
        for once in (True, False):
            for how in How:
                refused = how in (How.REFUSED, How.DONE_REFUSED)
                answers = REFUSALS if refused and not once else REFUSALS[:1]
                found += [Fault(at, how, answer, once) for answer in answers]
    return found


# test_object_faults has refreshes that fail, too.
LONG = {"refresh": [pytest.mark.long]}


@pytest.mark.parametrize(
    "operation", [pytest.param(one, id=str(one), marks=LONG.get(str(one), [])) for one in OPERATIONS]
)
def test_a_fault_at_any_request_costs_a_chunk_at_most(way, s3_server, operation):
    whole = Case(operation, way, s3_server)
    whole.judge(whole.work(Fault()), Fault())
    wrong, outcomes = [], dict[str, int]()
    tried = faults(len(whole.lines))
    assert whole.lines
    for fault in tried:
        case = Case(operation, way, s3_server)
        try:
            done = case.work(fault)
            case.judge(done, fault)
            outcomes[done] = outcomes.get(done, 0) + 1
        except AssertionError as error:
            wrong.append(f"{fault} ({whole.lines[fault.at - 1]}): {str(error)[:400]}")
    told = f"{operation}: {len(whole.lines)} requests, {len(tried)} faults, {outcomes}"
    sys.stdout.write(f"{told}, {len(wrong)} wrong\n")
    assert not wrong, "\n".join(wrong[:20])
