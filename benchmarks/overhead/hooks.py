"""Measure the time inside the connector's hooks per engine step while transfers run.

There is a step about every millisecond. Four requests are always in flight: after one has ended, the next
step begins another with the same blocks. The time includes all delays of the hooks. Most of them are caused
by the reading threads (lanes), which share Python's interpreter lock with the hooks.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from kvferry.common.errors import TransferError
from kvferry.tools.measuring.reader import LoadRequest, Reader
from kvferry.tools.measuring.rounds import percentile
from kvferry.tools.measuring.simulated import SimulatedEngine, span_of

IN_FLIGHT = 4
STEPS = 1500
STEP_SECONDS = 1e-3
_ALL_SECONDS = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class HookTimes:
    """The times inside the hooks of a step.

    Attributes:
        steps: number of steps, all with transfers in flight.
        loads: number of loads that ended.
        in_flight: number of requests in flight.
        tokens: length of each request, in tokens.
        median, p99, longest: median, 99th percentile and maximum over all steps, in seconds.
    """

    steps: int
    loads: int
    in_flight: int
    tokens: int
    median: float
    p99: float
    longest: float


def measure(
    reader: Reader, source: SimulatedEngine, progress: Callable[[str], None], steps: int = STEPS
) -> HookTimes:
    """Time the hooks of `steps` steps while requests are loaded.

    Args:
        reader: reader of an engine with one KV cache group.
        source: engine to read from. Its request is split into the requests in flight.
        progress: function that is called with a line of text at the beginning.
        steps: number of steps to time.

    Raises:
        TransferError: a load failed or did not end.
    """
    progress(f"timing the hooks of {steps} steps")
    requests = _Requests(reader, source)
    deadline = time.monotonic() + _ALL_SECONDS
    times: list[float] = []
    while len(times) < steps and time.monotonic() < deadline:
        new = requests.refill()
        started = time.perf_counter()
        requests.step(new)
        times.append(time.perf_counter() - started)
        reader.producer.check()
        time.sleep(STEP_SECONDS)
    loads = requests.ended
    while requests.under_way and time.monotonic() < deadline:
        requests.step([])
        reader.producer.check()
        time.sleep(STEP_SECONDS)
    if not loads or requests.under_way:
        raise TransferError(f"{requests.under_way} transfers were still under way after {_ALL_SECONDS:g} s")
    return HookTimes(
        steps=len(times), loads=loads, in_flight=requests.slots, tokens=requests.tokens,
        median=percentile(times, 50), p99=percentile(times, 99), longest=max(times),
    )  # fmt: skip


class _Requests:
    """Requests of equal size. Each is in a slot with its own blocks.

    Attributes:
        slots: maximum number of requests in flight.
        tokens: length of each request, in tokens.
        ended: number of requests that have ended.
    """

    def __init__(self, reader: Reader, source: SimulatedEngine) -> None:
        (src,), (dst,) = source.tables, reader.engine.tables
        each = max(1, len(src) // IN_FLIGHT)
        self._reader = reader
        cuts = range(0, min(len(src), each * IN_FLIGHT), each)
        self._tables = [(src[at : at + each], dst[at : at + each]) for at in cuts]
        self._slot_of: dict[str, int] = {}
        self.slots = len(self._tables)
        self.tokens = each * source.shape.block_tokens
        self.ended = 0

    @property
    def under_way(self) -> int:
        """Return the number of requests in flight."""
        return len(self._slot_of)

    def refill(self) -> list[LoadRequest]:
        """Claim leases for new requests in all free slots, and return the requests."""
        new = []
        for slot in sorted(set(range(self.slots)) - set(self._slot_of.values())):
            src, dst = self._tables[slot]
            wanted = self._reader.load_request(span_of(self.tokens), (src,), (dst,))
            self._slot_of[wanted.key] = slot
            new.append(wanted)
        return new

    def step(self, new: list[LoadRequest]) -> None:
        """Run the hooks of one step, and release the leases of the loads that have ended.

        Raises:
            TransferError: a load failed.
        """
        for key, failure in self._reader.step(new).failures.items():
            if failure is not None:
                raise TransferError(f"kvferry could not read from the producer process: {failure}")
            self._reader.acknowledge(key)
            del self._slot_of[key]
            self.ended += 1
