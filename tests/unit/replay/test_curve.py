"""The hit rate by capacity from one pass, against a cache of each capacity."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from hypothesis import given, strategies as st

from kvferry.tools.replay.content import keys_of_each
from kvferry.tools.replay.curve import StackDistances, hit_rate_curve
from kvferry.tools.replay.settings import UNLIMITED, BlockPool, ReplaySettings, TierSetting
from kvferry.tools.replay.simulation import Simulation
from kvferry.tools.replay.trace.base import TraceRequest
from support.engine_pairs import Turn, conversations, small_model, trace_request
from support.examples import examples
from support.models import attention
from support.small_replays import passes_over

CHUNK, LONGEST, BLOCK = 8, 96, 4
MODEL, _ = small_model([attention()], chunk_tokens=CHUNK, block_tokens=BLOCK, step_tokens=1 << 20)
(GROUP,) = MODEL.groups


class PlainLRU:
    """Host memory of so many chunks. After a request, its chunks are the latest used, the first newest."""

    def __init__(self, chunks: int) -> None:
        self._most, self._chunks = chunks, OrderedDict[bytes, None]()

    def serve(self, request: TraceRequest, local: int) -> int:
        """Return how many tokens of the prompt are found, of which the engine has the first."""
        names, prompt = keys_of_each([request], CHUNK, 1)[0], request.prompt_tokens
        whole, tail = prompt // CHUNK, names.tail(prompt) if prompt % CHUNK else []
        keys = [*names.whole[0][:whole], *tail]
        found = next((n for n, key in enumerate(keys) if key not in self._chunks), len(keys))
        generated = names.whole[0][whole : names.computed_tokens // CHUNK]
        for key in reversed([*keys, *generated]):
            self._chunks[key] = None
            self._chunks.move_to_end(key)
        while len(self._chunks) > self._most:
            self._chunks.popitem(last=False)
        return max(min(found * CHUNK, prompt), local) if prompt - local > 1 else local


def share(turn: Turn, tenths: int) -> int:
    """Return a number of tokens of a prompt that the engine has; never the last one."""
    return tenths * (len(turn.prompt) - 1) // 10


def rates(
    turns: Iterable[Turn], capacities: list[int], unit: int, skip: int = 0, tenths: int = 0
) -> list[float]:
    distances = StackDistances(
        GROUP.chunk_bytes, CHUNK, [chunks * GROUP.chunk_bytes for chunks in capacities]
    )
    for number, turn in enumerate(turns):
        request = trace_request(turn, unit)
        distances.add(
            request, keys_of_each([request], CHUNK, 1)[0], share(turn, tenths), counted=number >= skip
        )
    return [point.hit_rate for point in distances.points()]


@examples(60)
@given(
    turns=conversations(most_tokens=LONGEST, requests=30),
    capacities=st.lists(st.integers(1, 80), min_size=1, max_size=6, unique=True).map(sorted),
    unit=st.sampled_from([1, 4, CHUNK]),
    skip=st.integers(0, 3),
    tenths=st.integers(0, 10),
)
def test_curve_equals_a_plain_lru_cache_of_each_capacity(turns, capacities, unit, skip, tenths):
    total = max(sum(len(turn.prompt) for turn in turns[skip:]), 1)
    expected = []
    for capacity in capacities:
        cache = PlainLRU(capacity)
        hits = [cache.serve(trace_request(turn, unit), share(turn, tenths)) for turn in turns]
        expected.append(sum(hits[skip:]) / total)
    assert rates(turns, capacities, unit, skip, tenths) == expected


@examples(20)
@given(
    turns=conversations(most_tokens=LONGEST, requests=20),
    blocks=st.sampled_from([0, LONGEST // BLOCK + 2, 60]),
)
def test_curve_equals_simulations_of_each_capacity_with_the_engines_own_prefix_cache(turns, blocks):
    requests = [trace_request(turn, 1) for turn in turns]

    def replayed(capacity: int) -> Simulation:
        host = TierSetting(kind="host", capacity_bytes=capacity, shared=False, bytes_per_second=1e9)
        simulation = Simulation(MODEL, ReplaySettings(tiers=(host,), pool=BlockPool(blocks)), 1)
        simulation.run(requests)
        return simulation

    points = hit_rate_curve(passes_over(lambda: requests, 1), replayed(UNLIMITED).replayed())
    fitting = [one for one in points if one.capacity_bytes >= (LONGEST // CHUNK + 2) * GROUP.chunk_bytes]
    assert fitting
    for one in fitting:
        assert one.hit_rate == replayed(one.capacity_bytes).results.hit_rate


def test_an_answer_that_is_given_again_takes_room_once():
    other, first = Turn(tuple(range(50, 58))), Turn(tuple(range(8)), tuple(range(100, 117)))
    # The last prompt needs its chunk, below one chunk of a prompt and two of an answer.
    assert rates([other, first, first, other], [3, 4], 1) == [8 / 32, 16 / 32]
