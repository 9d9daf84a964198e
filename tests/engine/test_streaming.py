"""A decode engine reads a prompt's KV while the prefill engine computes it."""

from __future__ import annotations

import secrets
import signal
from dataclasses import replace
from typing import Any

import pytest

from kvferry.tools.serving.router.bodies import ASK_FOR_KV
from support.vllm_engine.marks import engines, with_second_runner
from support.vllm_engine.pair import Pair, Setup, prompt
from support.waiting import wait_for

STEP, LEASE, DEADLINE = 256, 2.0, 3.0
OPTIONS = {"max_num_batched_tokens": STEP, "num_gpu_blocks_override": 90}
CONNECTOR = {
    "lease_seconds": LEASE,
    "load_timeout_seconds": DEADLINE,
    "handshake_seconds": 2.0,
    "patience_seconds": 2.0,
    "strategy": "direct",
    "verify_transfers": True,
}
ENVIRONMENT = {"UCX_TLS": "tcp,self"}
ALONE = Setup("gemma3", "streamed", OPTIONS, exact=True, connector=CONNECTOR, environment=ENVIRONMENT)
"""Layers that attend to all tokens are streamed; windows come with the end."""

OVERLAPPED = replace(ALONE, label="streamed-overlapped", asynchronous=True)
"""A step is scheduled while the one before runs, so tokens in flight count as computed."""

pytestmark = engines(
    "pair", with_second_runner(OVERLAPPED), [OVERLAPPED, ALONE, replace(OVERLAPPED, family="qwen3")]
)


@pytest.fixture(scope="module")
def known(pair: Pair) -> dict[str, Any]:
    """Facts about the prefill engine that a router takes from an earlier answer."""
    offer: dict[str, Any] = pair.through([prompt(40, 12)])[0]["offer"]
    assert offer["remote_step_tokens"] == STEP
    pair.forget()
    return offer


class Streamed:
    """A prompt that both engines were asked for at once."""

    def __init__(self, pair: Pair, known: dict[str, Any], text: list[int]) -> None:
        ticket = secrets.token_hex(16)
        self.pair, self.text = pair, text
        self.offer = {**known, "remote_request_id": ticket, "remote_num_tokens": None}
        ask = {**ASK_FOR_KV, "remote_request_id": ticket}
        self.there = pair.prefill.call("add", [text], [ask], 1)
        self.here = pair.decode.call("add", [text], [self.offer])
        self.parts: list[tuple[int, int]] = []

    def until(self, tokens: int) -> None:
        """Let the prefill engine compute so many tokens, and the decode engine read what it can."""
        while not any(end >= tokens for _, end in self.parts):
            assert not self.pair.prefill.call("steps", 1), "the prompt was to be in the making"
            self.take(20)

    def take(self, steps: int) -> None:
        self.pair.decode.call("steps", steps)
        self.parts += self.pair.decode.call("ordered_parts").get(self.here[0], [])

    def finish(self) -> dict[str, Any]:
        """The prefill engine computes the rest; the decode engine's answer."""
        while self.there[0] not in self.pair.prefill.call("steps", 1):
            self.take(20)
        return self.answer()

    def answer(self) -> dict[str, Any]:
        answer: dict[str, Any] = self.pair.decode.call("answers", self.here)[0]
        self.parts += self.pair.decode.call("ordered_parts").get(self.here[0], [])
        return answer


def quiet(pair: Pair) -> None:
    """Nothing is kept by either engine."""
    both = pair.prefill, pair.decode

    def released() -> bool:
        for engine in both:
            engine.call("step", 0.05)
        counters = [engine.call("counters") for engine in both]
        return not any(one[held] for one in counters for held in ("leases", "pins", "pulls"))

    wait_for(released)
    assert [engine.call("requests_left") for engine in both] == [0, 0]
    pair.forget()


def right(pair: Pair, text: list[int], answer: dict[str, Any]) -> None:
    pair.agree(answer, pair.reference([text])[0])


def test_computed_tokens_are_read_while_the_rest_is_computed(pair: Pair, known: dict[str, Any]) -> None:
    text = prompt(900, 1)
    one = Streamed(pair, known, text)
    one.until(2 * STEP)
    assert pair.decode.call("waiting_for_kv") == 1
    answer = one.finish()
    assert [first for first, _ in one.parts[1:]] == [end for _, end in one.parts[:-1]]
    assert (one.parts[0][0], one.parts[-1][1]) == (0, 899)
    assert len(one.parts) >= 3
    moved = next(iter(pair.decode.call("loaded").values()))
    theirs = pair.prefill.call("digests_of_offer", {**one.offer, "remote_num_tokens": 899})
    assert moved == theirs, "windows and all"
    quiet(pair)
    right(pair, text, answer)


@pytest.mark.parametrize("group", [0, -1])
def test_answer_depends_on_the_streamed_kv(pair: Pair, known: dict[str, Any], group: int) -> None:
    text = prompt(700, 2)
    pair.decode.call("spoil", group)
    try:
        spoiled = Streamed(pair, known, text).finish()
    finally:
        pair.decode.call("spoil", None)
    quiet(pair)
    reference = pair.reference([text])[0]
    assert spoiled["logprobs"] != reference["logprobs"]


@pytest.mark.long
def test_a_prompt_of_one_step_has_one_part(pair: Pair, known: dict[str, Any]) -> None:
    text = prompt(200, 3)
    one = Streamed(pair, known, text)
    answer = one.finish()
    assert one.parts == [(0, 199)]
    quiet(pair)
    right(pair, text, answer)


@pytest.mark.long
def test_aborted_prefill_ends_the_stream(pair: Pair, known: dict[str, Any]) -> None:
    text = prompt(900, 4)
    one = Streamed(pair, known, text)
    one.until(STEP)
    pair.prefill.call("abort", one.there)
    pair.prefill.call("steps", 1)
    other = pair.prefill.call("generate", [prompt(900, n) for n in (50, 51)])
    assert len(other) == 2, "its blocks are used again"
    answer = one.answer()
    quiet(pair)
    right(pair, text, answer)


def test_preempted_prefill_is_not_read_further(pair: Pair, known: dict[str, Any]) -> None:
    text = prompt(900, 5)
    one = Streamed(pair, known, text)
    one.until(STEP)
    pair.prefill.call("preempt", one.there[0])
    answer = one.finish()
    assert one.parts[-1][1] < 899, "it was not read to its end"
    quiet(pair)
    right(pair, text, answer)


def test_aborted_decode_request_ends_the_lease(pair: Pair, known: dict[str, Any]) -> None:
    text = prompt(900, 6)
    one = Streamed(pair, known, text)
    one.until(STEP)
    pair.decode.call("abort", one.here)
    while one.there[0] not in pair.prefill.call("steps", 1):
        pair.decode.call("steps", 5)
    quiet(pair)


@pytest.mark.long
def test_stopped_prefill_engine_is_awaited_until_the_deadline(pair: Pair, known: dict[str, Any]) -> None:
    text = prompt(900, 7)
    one = Streamed(pair, known, text)
    one.until(STEP)
    pair.prefill.signal(signal.SIGSTOP)
    try:
        answer = one.answer()
    finally:
        pair.prefill.signal(signal.SIGCONT)
    while one.there[0] not in pair.prefill.call("steps", 1):
        pass
    quiet(pair)
    right(pair, text, answer)


@pytest.mark.long
def test_a_second_prompt_with_the_ticket_does_not_replace_the_first(
    pair: Pair, known: dict[str, Any]
) -> None:
    text, other = prompt(900, 8), prompt(900, 9)
    one = Streamed(pair, known, text)
    one.until(STEP)
    ask = {**ASK_FOR_KV, "remote_request_id": one.offer["remote_request_id"]}
    theirs = pair.prefill.call("add", [other], [ask], 1)
    answer = one.finish()
    left = set(theirs) - set(one.there)
    while left and pair.prefill.call("requests_left") > 1:
        left -= set(pair.prefill.call("steps", 1))
    pair.prefill.call("step", LEASE + 1.0)
    quiet(pair)
    right(pair, text, answer)


@pytest.mark.long
def test_ticket_unknown_to_every_prefill_engine_is_awaited_like_any_source(
    pair: Pair, known: dict[str, Any]
) -> None:
    text = prompt(300, 10)
    offer = {**known, "remote_request_id": secrets.token_hex(16), "remote_num_tokens": None}
    answer = pair.decode.call("generate", [text], [offer])[0]
    quiet(pair)
    right(pair, text, answer)


@pytest.mark.parametrize("waits", [True, False])
def test_requests_whose_loads_end_one_after_another_are_computed_together(pair: Pair, waits: bool) -> None:
    # No more than may be loaded at a time into the small cache of Gemma 3.
    texts = [prompt(40, seed) for seed in range(3)]
    offers = [answer["params"] for answer in pair.prefill.call("prefill", texts)]
    names = pair.decode.call("add", texts, offers, 1)
    wait_for(lambda: pair.decode.call("redeemed") == len(texts))
    sizes = pair.decode.call("sizes_of_steps", names, waits=waits)
    assert sum(sizes) == len(texts)
    assert (sizes == [len(texts)]) == waits
    quiet(pair)


def test_dead_prefill_engine_is_not_awaited(pair: Pair, known: dict[str, Any]) -> None:
    """The last test: this pair ends with it."""
    text = prompt(900, 11)
    pair.decode.call("reset_prefix_cache")
    reference = pair.decode.call("generate", [text])[0]
    pair.decode.call("reset_prefix_cache")
    one = Streamed(pair, known, text)
    one.until(STEP)
    pair.prefill.kill()
    answer = one.answer()
    pair.agree(answer, reference)
    pair.decode.call("step", 1.0)
    assert pair.decode.call("requests_left") == 0
    counters = pair.decode.call("counters")
    assert (counters["pins"], counters["pulls"]) == (0, 0)
