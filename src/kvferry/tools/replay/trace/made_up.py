"""Made-up content for requests that are known by their lengths only.

A *text* is an endless sequence of tokens, identified by a seed. Two texts have no tokens in common. A request
consists of *passages* of texts, and a text always follows the same passages. So two requests have a common
prefix up to the first token where their texts differ.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvferry.tools.replay.trace.base import BATCH_REQUESTS, batches
from kvferry.tools.replay.trace.request import Ids, TraceRequest, mixed, places_within


class Passage(NamedTuple):
    """The tokens of a request from `first_token` on, up to the next passage or to the end of the request.

    They are the tokens of the text with this seed (uint64) at the same positions.
    """

    first_token: int
    seed: int


class Outline(NamedTuple):
    """A request with passages in place of identities.

    Attributes:
        arrival: seconds from the start of the trace to the arrival of the request.
        passages: content of prompt and output. The first passage begins at token 0.
        session: name of the conversation that the request belongs to; empty if unknown.
    """

    arrival: float
    prompt_tokens: int
    output_tokens: int
    passages: Sequence[Passage]
    session: str = ""


def write_out(
    outlines: Iterable[Outline], unit_tokens: int, batch_requests: int = BATCH_REQUESTS
) -> Iterator[TraceRequest]:
    """Give requests the identities of their content. They cover the generated tokens too.

    >>> first = Outline(0.0, 40, 8, [Passage(0, seed=1)])
    >>> longer = Outline(1.0, 64, 0, [Passage(0, seed=1)])
    >>> other = Outline(2.0, 64, 0, [Passage(0, seed=1), Passage(40, seed=2)])
    >>> ids = [request.prefix_ids.tolist() for request in write_out([first, longer, other], 16)]
    >>> ids[1][:3] == ids[0], ids[2][:2] == ids[0][:2], ids[2][2] in ids[1]
    (True, True, False)
    """
    for batch in batches(
        outlines,
        lambda each: (each.prompt_tokens + each.output_tokens) // unit_tokens,
        max_items=batch_requests,
    ):
        yield from _written(batch, unit_tokens)


def _written(batch: Sequence[Outline], unit_tokens: int) -> Iterator[TraceRequest]:
    # A text always follows the same passages, so the text at the end of a prefix identifies the whole prefix.
    seeds: list[int] = []
    first_units: list[int] = []
    counts: list[int] = []
    last_seeds: list[int] = []
    totals: list[int] = []
    for outline in batch:
        total = (outline.prompt_tokens + outline.output_tokens) // unit_tokens
        starts = [passage.first_token // unit_tokens for passage in outline.passages]
        first_units += starts
        counts += [end - start for start, end in pairwise([*starts, total])]
        seeds += [passage.seed for passage in outline.passages]
        last_seeds.append(_seed_at(outline.passages, outline.prompt_tokens - 1))
        totals.append(total)
    prefixes = _identities(seeds, first_units, np.array(counts))
    lengths = np.array([outline.prompt_tokens for outline in batch], np.uint64)
    # Mixed once more than those of prefixes, so that a number of tokens and a number of units never agree.
    prompts = mixed(mixed(mixed(np.array(last_seeds, np.uint64))) + lengths).tolist()
    for outline, prompt_id, end, total in zip(batch, prompts, accumulate(totals), totals, strict=True):
        yield TraceRequest(
            arrival=outline.arrival,
            prompt_tokens=outline.prompt_tokens,
            output_tokens=outline.output_tokens,
            unit_tokens=unit_tokens,
            prefix_ids=prefixes[end - total : end],
            prompt_id=prompt_id,
            session=outline.session,
        )


def _identities(seeds: list[int], first_units: list[int], counts: npt.NDArray[np.int64]) -> Ids:
    starts = mixed(np.array(seeds, np.uint64)) + np.array(first_units, np.uint64)
    return mixed(np.repeat(starts, counts) + places_within(counts).astype(np.uint64))


def _seed_at(passages: Sequence[Passage], token: int) -> int:
    return next(passage.seed for passage in reversed(passages) if passage.first_token <= token)
