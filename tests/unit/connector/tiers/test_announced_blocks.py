"""Blocks that an engine announces, against the prefixes that it loads: a router may believe the events."""

from __future__ import annotations

from array import array
from collections import defaultdict
from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given, strategies as st

from kvferry.connector.engine import BlockRun, PlainRequest
from kvferry.connector.events import BlocksRemoved, BlocksStored, Event, EventStream
from kvferry.geometry import GroupKind
from kvferry.geometry.canonical import derive as length
from kvferry.planning.select import first_attended
from kvferry.tools.models.store import LayerCache
from kvferry.tools.replay.engine import NO_PREFIX
from support.engine_pairs import Turn, conversations, small_model
from support.examples import examples
from support.models import attention, state
from support.served_engine import served_engine

PAGE = 4096
"""Bytes of a chunk of each small group."""
OTHER = 10**6
"""A token of no prompt."""
MODELS = {
    "full": [attention()],
    "window": [attention(), attention(kind=GroupKind.SLIDING, attention_span=24)],
    "window only": [attention(kind=GroupKind.SLIDING, attention_span=24)],
    "short window": [attention(), attention(kind=GroupKind.SLIDING, attention_span=6)],
    "chunked": [attention(kind=GroupKind.CHUNKED, attention_span=48), attention()],
    "state": [attention(), LayerCache(GroupKind.STATE, 0, state().fields[1:])],
}
SHAPES = st.sampled_from([(8, 4), (8, 2), (16, 4), (4, 4)])
"""Tokens per chunk and per block."""


class Router:
    """Knows the blocks of each tier by the events alone."""

    def __init__(self, groups: Sequence[LayerCache], block: int) -> None:
        self._groups, self._block = groups, block
        self._blocks: defaultdict[tuple[str, int], set[bytes]] = defaultdict(set)

    def hear(self, event: Event) -> None:
        if isinstance(event, BlocksStored):
            here = self._blocks[event.tier, event.blocks.group]
            assert here.isdisjoint(event.blocks.hashes), "a block is announced once"
            here.update(event.blocks.hashes)
        elif isinstance(event, BlocksRemoved):
            here = self._blocks[event.tier, event.group]
            assert here.issuperset(event.hashes), "a block that was announced goes once"
            here.difference_update(event.hashes)

    def longest(self, tier: str, prompt: Sequence[int]) -> int:
        """Tokens of the longest prefix, shorter than the prompt, for which every group has its blocks."""
        for end in range((len(prompt) - 1) // self._block * self._block, 0, -self._block):
            if all(self._continues(tier, group, prompt, end) for group in range(len(self._groups))):
                return end
        return 0

    def _continues(self, tier: str, group: int, prompt: Sequence[int], end: int) -> bool:
        one, last = self._groups[group], end // self._block
        first = max(first_attended(one, end), 0) // self._block
        first = last - 1 if one.kind is GroupKind.STATE else first
        names = {name_of(prompt[: (at + 1) * self._block]) for at in range(first, last)}
        return names <= self._blocks[tier, group]


def name_of(tokens: Sequence[int]) -> bytes:
    return array("I", tokens).tobytes()


def blocks_of(request: PlainRequest, group: int, tokens: range, block: int) -> BlockRun | None:
    ids, first, last = request.all_token_ids, tokens.start // block, tokens.stop // block
    if first >= last:
        return None
    names = tuple(name_of(ids[: (at + 1) * block]) for at in range(first, last))
    return BlockRun(
        group, names, name_of(ids[: first * block]) or None, ids[first * block : last * block], block
    )


@pytest.mark.parametrize("name", MODELS)
@given(
    turns=conversations(most_tokens=40, requests=6),
    shape=SHAPES,
    capacity=st.integers(12, 30),
    every=st.sampled_from([1, 2]),
)
@examples(6)
def test_a_prompt_that_goes_on_loads_what_is_announced(name, turns, shape, capacity, every):
    chunk, block = shape
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(length, "WINDOW_ALIGNMENT_TOKENS", block)
        shapes = {"chunk_tokens": chunk, "block_tokens": block, "snapshot_tokens": every * chunk}
        model, rank = small_model(MODELS[name], step_tokens=1000, **shapes)
        router = Router(model.groups, block)
        # Of such a window, one chunk may hold the first blocks and another chunk the last ones.
        may_be_less = any(0 < one.attention_span < chunk for one in model.groups)
        with served_engine(
            model,
            rank,
            host_bytes=capacity * PAGE,
            slow={"file": 24 * PAGE},
            events=EventStream(router.hear),
            describe_blocks=lambda *of: blocks_of(*of, block),
        ) as engine:
            for number, turn in enumerate(turns):
                engine.serve([*turn.prompt], [*turn.answer], NO_PREFIX)
                for prompt in prompts_that_branch_off(turns[: number + 1]):
                    asked = PlainRequest(request_id="asked", prompt_token_ids=prompt)
                    for tier, loadable in engine.half._tiering.look_up(asked).items():
                        announced = router.longest(tier, prompt)
                        assert loadable <= announced if may_be_less else loadable == announced, prompt


def prompts_that_branch_off(turns: Sequence[Turn]) -> Iterator[list[int]]:
    """Beginnings of these requests, each with another token after it."""
    ends = {tuple(tokens[:cut]) for tokens in map(whole, turns) for cut in range(2, len(tokens) + 1, 3)}
    return ([*tokens, OTHER] for tokens in ends)


def whole(turn: Turn) -> tuple[int, ...]:
    return (*turn.prompt, *turn.answer)
