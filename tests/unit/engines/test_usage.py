"""A decode engine reports as cached what the prefill engine had in its caches. Over vLLM's scheduler.

A single engine with the prefill engine's caches reports the same.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any

import pytest
from vllm.v1.metrics.stats import PromptTokenStats

from kvferry.connector.content import CHUNK_TOKENS
from support.clock import Clock
from support.mesh import MeshEngine, network
from support.vllm_cache import BLOCK, STEP

pytestmark = pytest.mark.slow

BLOCKS = 80
LONG = 5 * STEP + 10
"""Tokens of a prompt that takes several steps."""

TEXT = range(5000, 5000 + LONG)
KEPT = CHUNK_TOKENS
"""Tokens of an earlier turn."""

FRESH = (LONG, 0)
"""Tokens of a prompt that was never seen, and of them those cached."""


def run(*engines: MeshEngine, until: Sequence[str], clock: Clock) -> None:
    """Let the engines step until the last of them has answered these requests."""
    for engine in engines:
        engine.answered.clear()
    for _ in range(200):
        for engine in engines:
            engine.step()
        clock.now += 0.05
        if engines[-1].answered.issuperset(until):
            return
    pytest.fail("no answer")


def usage(engine: MeshEngine, name: str = "c") -> tuple[int, int, int]:
    """What an answer says: tokens of the prompt, cached ones, and ones that were written to the cache."""
    found = engine.usage[name]
    return found.num_prompt_tokens, found.num_cached_tokens, found.num_cache_creation_tokens


class Engines:
    """A prefill, a decode and a single engine. The single one is asked what the prefill engine is asked."""

    def __init__(self, net: Any, **settings: Any) -> None:
        self.clock = net.clock
        self.prefill, self.decode, self.single = (
            MeshEngine(net, name, BLOCKS, **settings) for name in ("prefill", "decode", "single")
        )

    def warm(self, engine: MeshEngine, text: Sequence[int], answer: int = 1) -> None:
        """Let an engine compute a prompt alone."""
        engine.add("warm", text, answer, None)
        run(engine, until=["warm"], clock=self.clock)

    def ask(
        self, text: Sequence[int], *, at_once: bool, params: Any = None, names: Sequence[str] = ("c",)
    ) -> None:
        """Ask as a router does, and ask the single engine."""
        ticket = secrets.token_hex(16)
        named = {"remote_request_id": ticket} if at_once else {}
        self.prefill.add("p", text, 1, {"do_remote_decode": True, **named})
        if at_once:
            offer = self.prefill.offer_at_once(ticket)
        else:
            run(self.prefill, until=["p"], clock=self.clock)
            # As vLLM's scheduler does before the answer leaves the engine.
            offer = self.prefill.offer_of("p")
            assert offer is not None
            assert offer["remote_prefill_cached_tokens"] == self.prefill.usage["p"].num_cached_tokens
        for name in names:
            self.decode.add(name, text, 3, {**offer, **(params or {})})
        run(self.prefill, self.decode, until=names, clock=self.clock)
        self.single.add("c", text, 3, None)
        run(self.single, until=["c"], clock=self.clock)


@pytest.fixture(params=[False, True], ids=["one after the other", "both at once"])
def at_once(request):
    return request.param


@pytest.mark.parametrize("tokens", [20, STEP + 2, LONG])
@pytest.mark.parametrize("known", [0, 5 * BLOCK + 3, LONG])
def test_the_answer_reports_what_the_prefill_engine_had(at_once, known, tokens):
    with network(Clock()) as net:
        engines = Engines(net)
        for engine in (engines.prefill, engines.single):
            engines.warm(engine, [*TEXT[:known], 1])
        engines.ask(TEXT[:tokens], at_once=at_once)
        assert usage(engines.decode) == usage(engines.single)
        cached = min(known, tokens - 1) // BLOCK * BLOCK
        assert usage(engines.decode)[:2] == (tokens, cached)


def test_what_only_the_decode_engine_had_is_not_reported(at_once):
    with network(Clock()) as net:
        engines = Engines(net)
        engines.warm(engines.decode, TEXT[: 4 * BLOCK + 1])
        engines.ask(TEXT, at_once=at_once)
        assert usage(engines.decode) == usage(engines.single)
        assert usage(engines.decode)[:2] == FRESH
        assert engines.decode.usage["c"].num_local_cached_tokens == 4 * BLOCK


def test_all_samples_of_a_prompt_report_it(at_once):
    with network(Clock()) as net:
        engines = Engines(net)
        for engine in (engines.prefill, engines.single):
            engines.warm(engine, [*TEXT[: 2 * BLOCK], 1])
        engines.ask(TEXT, at_once=at_once, names=["c", "second"])
        assert usage(engines.decode) == usage(engines.decode, "second") == usage(engines.single)


def test_what_the_prefill_engine_loaded_from_another_place_counts_as_cached(at_once):
    with network(Clock()) as net:
        engines = Engines(net, turn_seconds=600.0)
        engines.ask(range(BLOCK + 1), at_once=False)  # the engines meet
        for engine in (engines.decode, engines.single):
            engines.warm(engine, TEXT[:KEPT])
        while engines.decode.connector.half.busy:
            engines.decode.step()  # then peers find the turn that it keeps
        engines.ask(TEXT, at_once=at_once)
        assert engines.prefill.usage["p"].num_external_cached_tokens == KEPT
        assert usage(engines.decode)[:2] == (LONG, KEPT)


def by_source(engine: MeshEngine) -> dict[str, int]:
    """What the answer adds to ``vllm:prompt_tokens_by_source``."""
    stats = PromptTokenStats()
    stats.update_from_output(engine.usage["c"])
    return {source: stats.get_by_source(source) for source in stats.ALL_SOURCES}


@pytest.mark.parametrize("known", [0, 4 * BLOCK])
def test_sources_of_a_prompts_tokens_are_counted_as_they_were(at_once, known):
    with network(Clock()) as net:
        engines = Engines(net)
        engines.warm(engines.prefill, [*TEXT[: 2 * BLOCK], 1])
        engines.warm(engines.decode, [*TEXT[:known], 1])
        engines.ask(TEXT, at_once=at_once)
        found = by_source(engines.decode)
        assert found == {
            "local_compute": 1,
            "local_cache_hit": known,
            "external_kv_transfer": LONG - 1 - known,
        }


def test_tokens_of_a_load_that_has_failed_are_counted_as_computed(at_once):
    with network(Clock()) as net:
        engines = Engines(net)
        engines.warm(engines.decode, [*TEXT[: 4 * BLOCK], 1])
        net.refusal = lambda _: "the lease has ended"
        engines.ask(TEXT, at_once=at_once)
        found = by_source(engines.decode)
        assert found == {
            "local_compute": LONG - 4 * BLOCK,
            "local_cache_hit": 4 * BLOCK,
            "external_kv_transfer": 0,
        }


def test_a_prompt_that_is_computed_after_its_load_has_failed_reports_the_same(at_once):
    with network(Clock()) as net:
        engines = Engines(net)
        for engine in (engines.prefill, engines.single):
            engines.warm(engine, [*TEXT[: 2 * BLOCK], 1])
        net.refusal = lambda _: "the lease has ended"
        engines.ask(TEXT, at_once=at_once)
        assert usage(engines.decode) == usage(engines.single)


def test_a_decode_engine_that_is_told_nothing_reports_its_own_caches():
    with network(Clock()) as net:
        engines = Engines(net, patience_seconds=1.0)
        engines.warm(engines.decode, TEXT[: 4 * BLOCK + 1])
        engines.decode.add("c", TEXT, 3, engines.prefill.offer_at_once(secrets.token_hex(16)))
        run(engines.decode, until=["c"], clock=engines.clock)
        assert usage(engines.decode)[:2] == (LONG, 4 * BLOCK)


def test_no_more_tokens_are_reported_than_the_prompt_has():
    with network(Clock()) as net:
        engines = Engines(net)
        engines.ask(TEXT, at_once=False, params={"remote_prefill_cached_tokens": 1 << 30})
        assert usage(engines.decode)[:2] == (LONG, LONG)
