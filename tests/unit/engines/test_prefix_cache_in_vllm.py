"""Prefixes of which vLLM has the attention blocks only, over vLLM's scheduler: a load completes them.

The workers know what each block holds, so every step is checked: it finds the KV of all tokens before it, and
the recurrent state after exactly these tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, strategies as st

from kvferry.engines.vllm.compat.scheduler import VLLMPrefixCache
from kvferry.engines.vllm.connector import KVFerryConnector
from kvferry.engines.vllm.multi.connector import FerryMultiConnector
from kvferry.geometry import GroupKind
from support.examples import examples
from support.vllm_cache import BLOCK
from support.vllm_scheduler import SETTINGS, VllmScheduler

HYBRID = ("full", "state")


class Content:
    """Content of a block: the KV or the state of a text up to a position.

    Under asynchronous scheduling a step may compute tokens that the scheduler does not know yet.
    """

    def __init__(self, tokens: Sequence[int], end: int) -> None:
        self.tokens, self.end = tuple(tokens[:end]), end

    def is_state_of(self, tokens: Sequence[int], end: int) -> bool:
        return self.end == end and self.tokens == tuple(tokens[: len(self.tokens)])

    def has_kv_of(self, tokens: Sequence[int], end: int) -> bool:
        known = min(len(self.tokens), end)
        return self.end >= end and self.tokens[:known] == tuple(tokens[:known])


class WitnessedScheduler(VllmScheduler):
    """A scheduler that records the content of its blocks, and checks every step that reads them.

    Attributes:
        content: content of each block that was written, by its id.
        loads_state: whether loads write the state; if not, each step that needs it must fail.
        checked: number of requests that were checked in all steps.
    """

    def __init__(self, kinds: tuple[str, ...] = HYBRID, blocks: int = 80, **more: Any) -> None:
        super().__init__(kinds, blocks, **more)
        self.content: dict[int, Content] = {}
        self.loads_state = True
        self.checked = 0

    def end(self, load: Any, failure: str | None = None, *, late: bool = False) -> None:
        if failure is None and load.request_id in self.scheduler.requests:
            tokens = self.scheduler.requests[load.request_id].all_token_ids
            for group, table in zip(self.connector.engine.groups, load.tables, strict=True):
                span = load.span
                if group.kind is GroupKind.STATE:
                    content = Content(tokens, span.total) if self.loads_state else Content((), 0)
                    self.content[int(table[0])] = content
                    continue
                for number in range(span.begins // BLOCK, -(-span.ends // BLOCK)):
                    self.content[int(table[number])] = Content(tokens, min(span.ends, (number + 1) * BLOCK))
        super().end(load, failure, late=late)

    def blocks_written(self, output: Any) -> set[int]:
        for name, count in output.num_scheduled_tokens.items():
            request = self.scheduler.requests[name]
            tokens, end = request.all_token_ids, request.num_computed_tokens
            before = end - count
            self.checked += 1
            tables = self.scheduler.kv_cache_manager.get_block_ids(name)
            for group, table in zip(self.connector.engine.groups, tables, strict=True):
                if group.kind is GroupKind.STATE:
                    if before:
                        held = self.content[table[(before - 1) // BLOCK]]
                        assert held.is_state_of(tokens, before), (
                            "not the state after the tokens before this step"
                        )
                    self.content[table[(end - 1) // BLOCK]] = Content(tokens, end)
                    continue
                for number in range(-(-before // BLOCK)):
                    read = min(before, (number + 1) * BLOCK)
                    assert self.content[table[number]].has_kv_of(tokens, read), "not the KV of these tokens"
                for number in range(before // BLOCK, -(-end // BLOCK)):
                    self.content[table[number]] = Content(tokens, min(end, (number + 1) * BLOCK))
        return super().blocks_written(output)

    def serve(self, tokens: Any, answer: int = 1, failure: str | None = None, **totals: int) -> Any:
        """Ask, and step until it is answered. The first load fails if there is a `failure`."""
        one = self.ask(tokens, answer, **totals)
        self.run(failure)
        assert one.request_id in self.answered
        return one

    def run(self, failure: str | None = None) -> None:
        """Step until all requests have ended."""
        for _ in range(400):
            if not self.scheduler.requests:
                return
            self.step()
            for load in list(self.loading):
                self.end(load, failure)
                failure = None
        raise AssertionError("a request never ends")

    @property
    def loads(self) -> list[tuple[int, int, int]]:
        """(tokens before, tokens after, tokens of the request) of the loads since the last call."""
        taken, self.connector.loads = self.connector.loads, []
        return taken


def two_turns(**more: Any) -> tuple[WitnessedScheduler, Any]:
    """An engine that has loaded 70 tokens of a first turn, and the prompt of the second, of 100 tokens.

    The engine has four attention blocks, and no snapshot at the end of a block.
    """
    engine = WitnessedScheduler(**more)
    engine.serve(range(71), peer=70)
    assert engine.loads == [(0, 70, 71)]
    return engine, range(100)


def test_a_load_completes_the_attention_blocks_that_the_engine_has() -> None:
    engine, prompt = two_turns()
    engine.serve(prompt, peer=99)
    assert engine.loads == [(4 * BLOCK, 99, 100)]


def test_without_a_source_the_engine_continues_from_the_state_that_it_has() -> None:
    engine, prompt = two_turns()
    one = engine.serve(prompt)
    assert engine.loads == []
    assert one.num_preemptions == 0
    assert engine.connector.found[one.request_id] == 4 * BLOCK


def test_a_source_that_has_no_more_than_the_engines_blocks_brings_the_last_of_them_and_the_state() -> None:
    for total in (64, 50, 49, 48, 20, 16, 1):
        engine, prompt = two_turns()
        engine.serve(prompt, peer=total)
        cut = (total - 1) // BLOCK * BLOCK
        assert engine.loads == [(cut, total, 100)], f"{total} tokens are offered"
        engine.serve(range(120), peer=119)
        assert engine.loads == [(96, 119, 120)], "the evicted block is in the prefix cache again"


def test_a_prompt_of_whole_blocks_whose_state_is_missing_is_loaded_not_computed() -> None:
    """Its last token is computed here. All of its other tokens have attention blocks."""
    engine = WitnessedScheduler()
    engine.serve(range(71), peer=70)
    engine.serve(range(65), peer=64)
    assert engine.loads == [(0, 70, 71), (48, 64, 65)]


def test_all_copies_of_a_block_are_evicted() -> None:
    engine = WitnessedScheduler()
    both = [engine.ask(range(71), 1, peer=70) for _ in range(2)]
    engine.run()
    (one,) = engine.pool.get_cached_block(both[0].block_hashes[3], [0])
    assert sum(block.block_hash == one.block_hash for block in engine.pool.blocks) == 2
    engine.serve(range(100), peer=50)
    assert engine.loads[-1] == (48, 50, 100)


def test_a_prefix_that_stays_as_long_is_not_shortened_again(monkeypatch) -> None:
    """Others may put the evicted block back at once."""
    engine, prompt = two_turns()
    shortened: list[int] = []
    monkeypatch.setattr(VLLMPrefixCache, "shorten", lambda _, request, tokens: shortened.append(tokens))
    engine.serve(prompt, peer=50)
    assert (engine.loads, shortened) == ([], [48])


def test_the_next_source_completes_the_blocks_after_a_failed_load_or_the_prompt_is_computed() -> None:
    engine, prompt = two_turns()
    engine.serve(prompt, failure="lost", peer=99, tiers=90)
    assert engine.loads == [(64, 99, 100), (64, 90, 100)]
    engine, prompt = two_turns()
    engine.serve(prompt, failure="lost", peer=99)
    assert engine.loads == [(64, 99, 100)]


def test_a_preempted_request_loads_the_state_anew() -> None:
    engine, prompt = two_turns()
    one = engine.ask(prompt, answer=30, peer=99)
    for _ in range(4):
        engine.step()
        for load in list(engine.loading):
            engine.end(load)
    engine.preempt()
    engine.run()
    assert one.request_id in engine.answered
    assert engine.loads[0] == (64, 99, 100)


TURNS = st.tuples(
    st.integers(0, 1),  # which of two conversations goes on
    st.integers(2, 60),  # tokens that a turn adds
    st.integers(1, 61),  # tokens at its end that no source has; state must not have seen the last
    st.integers(1, 20),  # tokens of the answer
)


@examples(100)
@given(
    steps=st.lists(
        st.tuples(st.lists(TURNS, min_size=1, max_size=3), st.sampled_from([None, None, None, "lost"])),
        min_size=2,
        max_size=6,
    ),
    blocks=st.integers(45, 90),
    overlaps=st.booleans(),
)
def test_each_step_of_a_conversation_finds_what_it_needs(steps, blocks, overlaps) -> None:
    """Turns are asked together, too, so they share blocks that are in use. Few blocks mean evictions."""
    engine = WitnessedScheduler(blocks=blocks, overlaps=overlaps)
    free = engine.pool.get_num_free_blocks()
    said: list[list[int]] = [[], []]
    for number, (turns, failure) in enumerate(steps):
        asked = []
        for which, more, lacking, answer in turns:
            text = [*said[which], *(10_000 * which + 100 * number + n for n in range(more))]
            if len(text) + answer < 200:
                one = engine.ask(text, answer, peer=max(len(text) - lacking, 0))
                asked.append((which, one))
        engine.run(failure)
        assert {one.request_id for _, one in asked} <= engine.answered
        for local_tokens, total, tokens in engine.loads:
            assert local_tokens % BLOCK == 0
            assert local_tokens < total <= tokens
        said = [
            next((list(one.all_token_ids) for n, one in asked if n == which), said[which]) for which in (0, 1)
        ]
    for _ in range(4):
        engine.step()
    assert engine.checked
    assert not engine.torn
    assert engine.pool.get_num_free_blocks() == free


def test_the_content_check_finds_a_load_without_the_state() -> None:
    engine, prompt = two_turns()
    engine.loads_state = False
    with pytest.raises(AssertionError, match="not the state"):
        engine.serve(prompt, peer=99)


def test_the_content_check_finds_blocks_that_are_used_without_a_load() -> None:
    engine, prompt = two_turns()
    manager = engine.scheduler.kv_cache_manager
    find = manager.get_computed_blocks_for_connector
    manager.get_computed_blocks_for_connector = lambda request: (*find(request)[:3], False)
    with pytest.raises((AssertionError, KeyError)):
        engine.serve(prompt)


@pytest.mark.parametrize(
    ("kinds", "completes"),
    [
        (("full", "state"), True),
        (("full", "state", "state"), True),
        (("full", "full", "state"), True),  # one block table each, of one kind: vLLM looks them up together
        (("full",), False),
        (("full", "window"), False),
        (("state",), False),
        (("window", "state"), False),
        (("full", "window", "state"), False),  # a load would not bring the window that vLLM lacks
    ],
    ids=str,
)
def test_only_state_may_be_missing(kinds, completes) -> None:
    engine = VllmScheduler(kinds)
    assert (VLLMPrefixCache.of(engine.scheduler.kv_cache_manager) is not None) == completes
    assert engine.connector.supports_divergent_local_hybrid_hits == completes


def test_computing_is_valued_from_the_state_that_the_engine_has(monkeypatch) -> None:
    engine, prompt = two_turns()
    asked: list[tuple[bool, int]] = []
    value = engine.connector.admission._chooser.value
    monkeypatch.setattr(
        type(engine.connector.admission._chooser),
        "value",
        lambda self, bid, missing: asked.append((bid is None, missing)) or value(bid, missing),
    )
    engine.serve(prompt, peer=99)
    assert (False, 36) in asked, "of a load, all tokens beyond the blocks"
    assert {missing for computing, missing in asked if computing} == {100}, "the engine has no state"


@pytest.mark.parametrize("connector", [KVFerryConnector, FerryMultiConnector])
@pytest.mark.parametrize(("kinds", "completes"), [(HYBRID, True), (("full", "window"), False)], ids=str)
def test_kvferrys_connectors_complete_prefixes_of_hybrids_alone(connector, kinds, completes) -> None:
    engine = VllmScheduler(kinds, connector=connector, settings=SETTINGS[connector])
    assert engine.scheduler.connector.supports_divergent_local_hybrid_hits == completes
    if connector is FerryMultiConnector:
        assert (engine.scheduler.connector._admission.prefix_cache is not None) == completes
