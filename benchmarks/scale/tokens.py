"""Case: tokens of a prompt.

- *keys*: digest the token ids into the keys of the prompt's chunks, as when a request arrives.
- *plan*: plan the read of the whole prompt, with block tables as lists, as in `benchmarks overhead`.
- *offer*: bytes of ``kv_transfer_params`` as JSON, which pass through the router. Per request, not per token.
- *reply*: bytes of the message with the block tables and the lease, which only the two engines exchange.

Short prompts are measured several times in a round, and the mean is taken.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager

import numpy as np

from benchmarks.overhead.planning import PlannedPeer
from benchmarks.scale.case import Case, Figures
from benchmarks.scale.producer import BLOCK_TOKENS, RetainingProducer
from benchmarks.scale.result import Measure
from kvferry.common.errors import TransferError
from kvferry.keys.chunk import ChunkKeys
from kvferry.tools.bench.rank_chunks import CHUNK_TOKENS
from kvferry.tools.measuring.reader import as_arrays
from kvferry.tools.measuring.simulated import read_geometry, simulate_engine
from kvferry.tools.plan.side import EngineSide
from kvferry.transport.lease import LeaseWord
from kvferry.transport.messages import encode
from kvferry.transport.read_plan import ReadOrder
from kvferry.transport.redeem import Redeemed

MODEL = "Llama-3.1-8B"
_VOCABULARY, _TOKENS_PER_ROUND = 128_000, 500_000
_LEASE = LeaseWord(0, 0, 1)


@contextmanager
def _prepare(size: int) -> Iterator[Callable[[], Figures]]:
    """Yield a function that measures one round with a prompt of `size` tokens."""
    prompt = np.random.default_rng(7).integers(0, _VOCABULARY, size).tolist()
    reading, side = read_geometry(MODEL), EngineSide(block_tokens=BLOCK_TOKENS)
    src, dst = (simulate_engine(name, reading, side, size, seed=seed) for seed, name in enumerate("ab", 1))
    src_table, dst_table = ([table.tolist() for table in one.tables] for one in (src, dst))

    times = max(1, _TOKENS_PER_ROUND // size)

    def measured() -> Figures:
        began = time.perf_counter()
        for _ in range(times):
            ChunkKeys(CHUNK_TOKENS, prompt)
        keyed = time.perf_counter()
        for _ in range(times):
            peer.plan(ReadOrder("", "", src.span, as_arrays(src_table), as_arrays(dst_table), _LEASE))
        planned = time.perf_counter()
        return {"keys": (keyed - began) / times / size, "plan": (planned - keyed) / times / size}

    with closing(PlannedPeer(src, dst, 0)) as peer:
        yield measured


def _messages(size: int) -> Figures:
    """Return the sizes of the messages about the KV of a prompt of `size` tokens."""
    with closing(RetainingProducer(size)) as producer:
        offer = producer.retain("request")
        reply = producer.redeem(offer)
    if not isinstance(reply, Redeemed):
        raise TransferError("a producer does not redeem its own ticket")
    offer.pop("remote_sealed_grant", None)  # at most 4,096 characters
    return {"offer": float(len(json.dumps(offer))), "reply": len(encode(reply)) / size}


CASE = Case(
    name="tokens",
    noun="tokens",
    sizes=(10_000, 50_000, 250_000, 1_000_000),
    measures=(
        Measure(name="keys", label="digest {n} tokens into chunk keys", per="token", unit="seconds"),
        Measure(name="plan", label="plan the read of {n} tokens", per="token", unit="seconds"),
        Measure(
            name="offer", label="offer of {n} tokens, without a sealed grant", per="request", unit="bytes"
        ),
        Measure(
            name="reply", label="block tables of {n} tokens, engine to engine", per="token", unit="bytes"
        ),
    ),
    prepare=_prepare,
    once=_messages,
)
