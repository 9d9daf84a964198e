"""Case: finished requests whose blocks a producer retains until other engines have read them.

The producer is the real one, without sockets (`benchmarks.scale.producer`). Prompts have 1,024 tokens. A step
of the scheduler follows every 16 requests, as in an engine that finishes 16 prompts per step.

- *retain*: end a request, digest its prompt, grant a lease, publish a ticket, and make the offer.
- *redeem*: exchange a ticket for block tables, and claim the lease.
- *release*: end the claim, order the workers to raise the lease word, and free the lease's slot.
- *expire*: the same for leases that no consumer has claimed, all in one step.
- *step*: one step of the scheduler in which nothing happens, while all requests are retained.
- *memory*: what Python and numpy allocate per retained request (tracemalloc), without the engine's blocks.

The last size is the largest number of requests that a producer retains.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from functools import partial

from benchmarks.scale.case import Case, Figures
from benchmarks.scale.memory import traced_bytes
from benchmarks.scale.producer import RetainingProducer
from benchmarks.scale.result import Measure
from kvferry.common.errors import TransferError
from kvferry.connector.messages import LEASE_SLOTS
from kvferry.transport.redeem import Redeemed

PROMPT_TOKENS = 1024
_PER_STEP = 16
_STEPS = 200
_SHORT_LEASE_SECONDS = 1e-6


@contextmanager
def _prepare(size: int) -> Iterator[Callable[[], Figures]]:
    """Yield a function that measures one round with `size` requests."""
    yield partial(_round, size)


def _round(size: int) -> Figures:
    return {**_served(size), "expire": _expired(size)}


def _served(size: int) -> dict[str, float]:
    """Return the figures of requests whose KV is read."""
    with closing(RetainingProducer(PROMPT_TOKENS)) as producer:
        began = time.perf_counter()
        offers = []
        for number in range(size):
            offers.append(producer.retain(f"request-{number}"))
            if number % _PER_STEP == 0:
                producer.step()
        retained = time.perf_counter()
        for _ in range(_STEPS):
            producer.step()
        stepped = time.perf_counter()
        for number, offer in enumerate(offers):
            if not isinstance(producer.redeem(offer), Redeemed):
                raise TransferError("a producer does not redeem its own ticket")
            if number % _PER_STEP == 0:
                producer.step()
        redeemed = time.perf_counter()
        ended = 0
        for number, offer in enumerate(offers):
            producer.release(offer)
            if number % _PER_STEP == 0:
                ended += producer.step()
        ended += producer.step()
        released = time.perf_counter()
    if ended != size:
        raise TransferError(f"{ended} leases of {size} ended after their release")
    return {
        "retain": (retained - began) / size,
        "redeem": (redeemed - stepped) / size,
        "release": (released - redeemed) / size,
        "step": (stepped - retained) / _STEPS,
    }


def _expired(size: int) -> float:
    """Return the seconds per lease that expires."""
    with closing(RetainingProducer(PROMPT_TOKENS, _SHORT_LEASE_SECONDS)) as producer:
        for number in range(size):
            producer.retain(f"request-{number}")
        time.sleep(_SHORT_LEASE_SECONDS)
        logging.disable(logging.WARNING)  # it warns of a silent consumer
        began = time.perf_counter()
        ended = producer.step()
        seconds = time.perf_counter() - began
        logging.disable(logging.NOTSET)
    if ended != size:
        raise TransferError(f"{ended} leases of {size} have expired")
    return seconds / size


def _memory(size: int) -> Figures:
    with closing(RetainingProducer(PROMPT_TOKENS)) as producer:

        def make() -> object:
            for number in range(size):
                producer.retain(f"request-{number}")
            producer.step()
            return None

        return {"memory": traced_bytes(make) / size}


CASE = Case(
    name="requests",
    noun="requests",
    sizes=(100, 500, 2_500, LEASE_SLOTS),
    measures=(
        Measure(name="retain", label="retain {n} requests", per="request", unit="seconds"),
        Measure(name="redeem", label="redeem the tickets of {n} requests", per="request", unit="seconds"),
        Measure(name="release", label="release {n} requests", per="request", unit="seconds"),
        Measure(name="expire", label="let {n} requests expire", per="request", unit="seconds"),
        Measure(
            name="step", label="a scheduler step while {n} requests are retained", per="step", unit="seconds"
        ),
        Measure(name="memory", label="memory for {n} retained requests", per="request", unit="bytes"),
    ),
    prepare=_prepare,
    once=_memory,
)
