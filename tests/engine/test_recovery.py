"""Whatever goes wrong between two engines: no wrong token, no stuck request, no dead engine."""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from support.explain import explain
from support.vllm_engine.pair import SOON, Pair, Setup, prompt
from support.vllm_engine.process import Engine
from support.vllm_engine.runners import SLOWNESS
from support.waiting import wait_for

LEASE = DEADLINE = 2.0 * SLOWNESS
OVER_TCP = Setup(
    "gemma3",
    "over-tcp",
    {"max_num_batched_tokens": 256, "num_gpu_blocks_override": 90},
    exact=True,
    decode_options={"num_gpu_blocks_override": 60},
    connector={
        "lease_seconds": LEASE,
        "load_timeout_seconds": DEADLINE,
        "handshake_seconds": 2.0,
        "patience_seconds": 3.0,
        "strategy": "direct",
        "late_blocks": 1.0,  # so that two loads of so small a pool may be late at once
    },
    environment={"UCX_TLS": "tcp,self"},
)
"""Over TCP a stopped producer really stops a read: nothing else could carry it out."""

pytestmark = [
    pytest.mark.engine,
    pytest.mark.parametrize("pair", [pytest.param(OVER_TCP, id=str(OVER_TCP))], indirect=True),
]


def offer_of(pair: Pair, text: list[int]) -> dict[str, Any]:
    offer: dict[str, Any] = pair.prefill.call("prefill", [text])[0]["params"]
    return offer


def acquaint(pair: Pair) -> None:
    """One transfer, so that the handshake is behind them."""
    assert pair.through([prompt(40, 12)])[0]["moved"]
    pair.forget()


def claimed(pair: Pair, texts: list[list[int]]) -> list[str]:
    """Requests that wait to be scheduled by the decode engine, their tickets redeemed: all can be loaded."""
    offers = [answer["params"] for answer in pair.prefill.call("prefill", texts)]
    names: list[str] = pair.decode.call("add", texts, offers)
    wait_for(lambda: pair.decode.call("redeemed") == len(texts))
    return names


def quiet(pair: Pair) -> bool:
    pair.decode.call("step", 0.05)
    counters = pair.decode.call("counters")
    return bool(counters["pins"] == 0 and counters["pulls"] == 0)


@contextmanager
def counting(engine: Engine, **expected: float) -> Iterator[None]:
    """What happens meanwhile changes these metrics of an engine by so much, and all are sound.

    Args:
        engine: one of a pair.
        expected: by name and labels, joined by two underscores in place of a space.
    """
    before = Counter(engine.call("counted"))
    yield
    now = Counter(engine.call("counted"))
    assert min(now.values()) >= 0
    missed = sum(n for name, n in now.items() if name.startswith("misses peer"))
    assert now["queries peer"] == now["hits peer"] + missed
    names = {name: name.replace("__", " ") for name in expected}
    assert {name: now[names[name]] - before[names[name]] for name in expected} == expected


def computed_here(pair: Pair, text: list[int], offer: dict[str, Any]) -> None:
    """The decode engine answers rightly without loading anything."""
    answer = pair.decode.call("generate", [text], [offer])[0]
    assert not pair.decode.call("loaded")
    pair.decode.call("reset_prefix_cache")
    pair.agree(answer, pair.decode.call("generate", [text])[0])
    pair.decode.call("reset_prefix_cache")


def test_the_pair_works_over_tcp_from_the_first_ticket_although_the_producer_answers_slowly(
    pair: Pair,
) -> None:
    """The engines have not met, and the decode engine knows how fast it computes."""
    text = prompt(300, 1)
    pair.decode.call("generate", [prompt(300, 2)])
    pair.prefill.call("answer_slowly", 1.0)
    with counting(pair.decode, tickets__hit=1):
        answer = pair.through([text])[0]
        assert answer["moved"]
    pair.prefill.call("answer_slowly", 0.0)
    pair.agree(answer, pair.reference([text])[0])
    pair.forget()


@pytest.mark.parametrize("sealed", [True, False])
def test_blocks_of_an_expired_lease_are_never_used(pair: Pair, *, sealed: bool) -> None:
    text = prompt(300, 2)
    with counting(pair.prefill, leases_granted=1, leases_ended__expired=1, leases=0):
        offer = offer_of(pair, text)
        pair.prefill.call("step", LEASE + SOON)
        assert pair.prefill.call("requests_left") == 0
    pair.prefill.call("generate", [prompt(700, n) for n in (50, 51, 52)])
    if sealed:  # the read begins before the producer refuses the claim, or after
        expected = {"queries__peer": 1, "hits__peer": 0, "pending_loads__peer": 0}
    else:
        del offer["remote_sealed_grant"]
        expected = {"loads__peer__failed": 0, "misses__peer__refused__": 1}
    with counting(pair.decode, **expected):
        computed_here(pair, text, offer)


@pytest.mark.parametrize("sealed", [True, False])
def test_a_sealed_grant_is_read_without_the_producers_answer(pair: Pair, *, sealed: bool) -> None:
    acquaint(pair)
    text = prompt(300, 5)
    offer = offer_of(pair, text)
    if not sealed:  # the first character, which is of the nonce
        letter = "B" if offer["remote_sealed_grant"][0] == "A" else "A"
        offer["remote_sealed_grant"] = letter + offer["remote_sealed_grant"][1:]
    pair.prefill.call("hold_answers")
    (name,) = pair.decode.call("add", [text], [offer])
    if not sealed:
        assert not pair.decode.call("steps", 20)
        assert pair.decode.call("counters")["pins"] == 0, "it waits"
        pair.prefill.call("release_answers")
    (answer,) = pair.decode.call("answers", [name])
    assert len(pair.decode.call("loaded")) == 1
    pair.prefill.call("release_answers")
    pair.agree(answer, pair.reference([text])[0])
    pair.prefill.call("step", SOON)
    assert pair.prefill.call("requests_left") == 0, "the claim has followed, and its end"
    pair.forget()


def test_a_lease_lives_while_its_request_waits_but_not_if_the_engine_runs_no_steps(pair: Pair) -> None:
    text, other = prompt(300, 3), prompt(300, 4)
    name = pair.decode.call("add", [text], [offer_of(pair, text)])
    pair.prefill.call("step", 2 * LEASE)
    assert pair.prefill.call("requests_left") == 1
    while name[0] not in pair.decode.call("steps", 5):
        pass
    assert pair.decode.call("loaded")
    pair.prefill.call("step", SOON)
    assert pair.prefill.call("requests_left") == 0
    name = pair.decode.call("add", [other], [offer_of(pair, other)])
    pair.prefill.call("step", SOON + 4 * LEASE)  # as long as an engine without steps keeps leases alive
    assert pair.prefill.call("requests_left") == 0
    assert pair.decode.call("answers", name)[0]["tokens"]
    pair.forget()


def fill(engine: Engine, first: int) -> tuple[list[list[int]], list[dict[str, Any]]]:
    """Have an engine keep prompts for others, until no other one fits. Return the prompts and the offers."""
    texts, offers, used = [], [], 0
    free = engine.call("free_blocks")
    while free >= used:
        texts.append(prompt(300, first + len(texts)))
        offers.append(engine.call("prefill", texts[-1:])[0]["params"])
        used, free = free - engine.call("free_blocks"), engine.call("free_blocks")
    return texts, offers


@pytest.mark.parametrize("engines", [1, 2])
def test_engines_that_keep_all_blocks_for_requests_of_each_other_answer_all_the_same(
    pair: Pair, engines: int
) -> None:
    acquaint(pair)
    producers = [pair.prefill, pair.decode][:engines]
    filled = [fill(engine, 100 * (engines + number)) for number, engine in enumerate(producers, 1)]
    consumers = producers[::-1]
    if engines == 1:
        pair.prefill.call("evict_prefixes")  # or it would answer with its own blocks, and load nothing
    # Claims of sealed grants follow in steps, and a producer whose requests wait ends leases without a claim.
    asked = [(texts, [{**one, "remote_sealed_grant": ""} for one in offers]) for texts, offers in filled]
    names = [engine.call("add", *each) for engine, each in zip(consumers, asked, strict=True)]
    for engine, of in zip(consumers, names, strict=True):
        wait_for(lambda engine=engine, of=of: engine.call("redeemed") == len(of))
    for engine, of in zip(consumers, names, strict=True):
        engine.begin("answers", of)
    answers = [engine.end() for engine in consumers]
    told = [explain(name, "--json").stdout for of in names for name in of]
    assert any("no request has got blocks" in text for text in told)
    pair.forget()
    for engine, of, (texts, _) in zip(consumers, answers, filled, strict=True):
        for answer, text in zip(of, texts, strict=True):
            pair.agree(answer, engine.call("generate", [text])[0])
    pair.forget()


def test_offers_from_before_a_reset_of_either_engine_are_not_used(pair: Pair) -> None:
    acquaint(pair)
    text = prompt(300, 8)
    name = pair.decode.call("add", [text], [offer_of(pair, text)])
    pair.decode.call("reset_connector")
    while name[0] not in pair.decode.call("steps", 5):
        pass
    assert not pair.decode.call("loaded")
    pair.prefill.call("step", 1.0)
    assert pair.prefill.call("requests_left") == 0
    pair.forget()

    offer = offer_of(pair, text)
    assert not pair.prefill.call("reset_prefix_cache"), "blocks are in use"
    pair.prefill.call("reset_connector")
    pair.prefill.call("step", LEASE / 2)
    assert pair.prefill.call("reset_prefix_cache")
    computed_here(pair, text, offer)


def test_a_request_aborted_before_it_ran_releases_the_producer(pair: Pair) -> None:
    text = prompt(300, 4)
    name = pair.decode.call("add", [text], [offer_of(pair, text)])
    pair.decode.call("abort", name)
    pair.prefill.call("step", SOON)
    assert pair.prefill.call("requests_left") == 0
    wait_for(lambda: quiet(pair))


def test_a_request_aborted_while_loading_gives_its_blocks_back_once_nothing_can_land(pair: Pair) -> None:
    acquaint(pair)
    text = prompt(300, 5)
    free = pair.decode.call("free_blocks")
    name = claimed(pair, [text])
    pair.prefill.signal(signal.SIGSTOP)
    try:
        with counting(pair.decode, pending_loads__peer=1):
            pair.decode.call("steps", 3)
        assert pair.decode.call("waiting_for_kv") == 1
        with counting(pair.decode, loads__peer__dropped=1, pending_loads__peer=-1, queries__peer=0):
            pair.decode.call("abort", name)
            pair.decode.call("step", DEADLINE + SOON)
        assert pair.decode.call("counted")["late_blocks"] > 0
        assert pair.decode.call("requests_left") == 0
        assert pair.decode.call("counters")["pins"] == 1
        assert pair.decode.call("free_blocks") < free
    finally:
        pair.prefill.signal(signal.SIGCONT)
    answer = pair.through([prompt(40, 6)])[0]
    assert answer["moved"]
    wait_for(lambda: quiet(pair))
    assert pair.decode.call("counted")["late_blocks"] == 0
    pair.forget()
    assert pair.decode.call("free_blocks") == free


def test_request_past_its_deadline_is_computed_locally_and_late_bytes_are_harmless(pair: Pair) -> None:
    acquaint(pair)
    texts = [prompt(n, 7 + n) for n in (300, 500)]
    free = pair.decode.call("free_blocks")
    names = claimed(pair, texts)
    pair.prefill.signal(signal.SIGSTOP)
    try:
        late = {
            "loads__peer__expired": 2,
            "misses__peer__deadline__": 2,
            "recomputed_tokens__peer": 299 + 499,
        }
        with counting(pair.decode, queries__peer=2, pending_loads__peer=0, load_seconds__peer=0, **late):
            answers = pair.decode.call("answers", names)
        assert not pair.decode.call("loaded")
        assert pair.decode.call("counters")["pins"] == 2
        others = [prompt(600, n) for n in (60, 61, 62)]
        pair.decode.call("generate", others)
    finally:
        pair.prefill.signal(signal.SIGCONT)
    for answer, reference in zip(answers, pair.reference(texts), strict=True):
        pair.agree(answer, reference)
    wait_for(lambda: quiet(pair) or not pair.decode.call("generate", [prompt(10, 8)], tokens=1))
    pair.forget()
    assert pair.decode.call("free_blocks") == free


def test_preempting_decode_engine_answers_correctly(pair: Pair) -> None:
    texts = [prompt(n, n) for n in (620, 624, 628, 632, 636)]  # each needs another block soon
    assert pair.decode.call("preemptions") == 0
    answers = pair.through(texts, tokens=40)
    assert pair.decode.call("preemptions") > 0, "the block pool was large enough: nothing was shown"
    assert all(answer["moved"] for answer in answers)
    for answer, reference in zip(answers, pair.reference(texts, tokens=40), strict=True):
        pair.agree(answer, reference)
    wait_for(lambda: quiet(pair))
    pair.forget()


def test_preempting_prefill_engine_hands_over_the_right_bytes(pair: Pair) -> None:
    assert pair.prefill.call("preemptions") == 0
    others = pair.prefill.call("add", [prompt(600, n) for n in range(70, 76)], [None] * 6, 350)
    pair.prefill.call("steps", 10)

    def one_by_one(texts: list[list[int]]) -> list[dict[str, Any]]:
        """Answers; while two were computed among the others, the first one's lease would run."""
        return [answer for text in texts for answer in pair.through([text], prefill="prefill_among_others")]

    answers = one_by_one(texts := [prompt(n, n) for n in (390, 510)])
    while not pair.prefill.call("preemptions"):
        assert not pair.prefill.call("steps", 20), "the block pool was large enough: nothing was shown"
    answers += one_by_one(more := [prompt(420, 1), prompt(530, 2)])
    assert all(answer["moved"] for answer in answers)
    pair.prefill.call("abort", others)
    for answer, reference in zip(answers, pair.reference(texts + more), strict=True):
        pair.agree(answer, reference)
    pair.forget()


MALFORMED: dict[str, dict[str, Any]] = {
    "no ticket": {"remote_request_id": None},
    "a ticket that was guessed": {"remote_request_id": "0" * 32},
    "a ticket of 40 MB": {"remote_request_id": "0" * 40_000_000},
    "a port that is text": {"remote_port": "http"},
    "more tokens than the prompt has": {"remote_num_tokens": 10**6},
    "fewer tokens than the ticket is for": {"remote_num_tokens": 17},
    "another engine's name": {"remote_engine_id": "someone else"},
    "nobody at the address": {"remote_port": 9},
}
LIES: dict[str, Callable[[list[list[int]]], dict[str, Any]]] = {
    "too few groups": lambda tables: {"tables": tables[:1]},
    "block ids that do not exist": lambda tables: {"tables": [[10**6] * len(t) for t in tables]},
    "null blocks": lambda tables: {"tables": [[0] * len(t) for t in tables]},
    "tables that are too short": lambda tables: {"tables": [t[:1] for t in tables]},
    "a slot that does not exist": lambda tables: {"slot": 10**6},
    "the word of a lease that has ended": lambda tables: {"generation": 10**6},
}


SHORT = ("a ticket that was guessed", "the word of a lease that has ended")
"""The scheduler finds the first, the worker the second. Unit tests of peers and transport have the others."""


@pytest.mark.parametrize(
    "what",
    [pytest.param(what, marks=[] if what in SHORT else pytest.mark.long) for what in (*MALFORMED, *LIES)],
)
def test_malformed_offer_or_grant_is_logged_and_its_prompt_computed_locally(pair: Pair, what: str) -> None:
    text = prompt(300, 9)
    offer = offer_of(pair, text)
    if what in LIES:
        offer = pair.prefill.call("regrant", offer, LIES[what](pair.prefill.call("granted", offer)))
    pair.decode.call("say_again")
    said = len(pair.decode.log.read_text())
    with counting(pair.decode, queries__peer=1, hits__peer=0, pending_loads__peer=0):
        computed_here(pair, text, {**offer, **MALFORMED.get(what, {})})
    new = pair.decode.log.read_text()[said:]
    assert "is not served by" in new
    assert len(new) < 5000
    pair.prefill.call("step", LEASE + SOON)
    assert pair.prefill.call("requests_left") == 0
    wait_for(lambda: quiet(pair))
    pair.prefill.call("reset_prefix_cache")


def test_unused_peer_is_forgotten_and_met_again(pair: Pair) -> None:
    for seed, seconds in ((20, 600.0), (21, 0.0), (22, 600.0)):
        pair.decode.call("forget_peers_after", 600.0)
        text = prompt(300, seed)
        answer = pair.through([text])[0]
        assert answer["moved"]
        pair.agree(answer, pair.reference([text])[0])
        pair.decode.call("forget_peers_after", seconds)
        pair.decode.call("generate", [text])
        wait_for(lambda known=1 if seconds else 0: pair.decode.call("peers") == known)
        pair.forget()


def test_dead_producer_costs_its_requests_only_a_recompute(pair: Pair) -> None:
    """Last: the pair is not used after it."""
    texts = [prompt(300, 10), prompt(310, 11), prompt(320, 12)]
    offers = [answer["params"] for answer in pair.prefill.call("prefill", texts)]
    references = [pair.decode.call("generate", [text])[0] for text in texts]
    pair.decode.call("reset_prefix_cache")
    pair.prefill.kill()
    before = [Counter(pair.decode.call("counted"))]
    for text, offer, reference in zip(texts, offers, references, strict=True):
        if len(before) > 1:
            del offer["remote_sealed_grant"]
        answer = pair.decode.call("generate", [text], [offer])[0]
        assert not pair.decode.call("loaded")
        pair.agree(answer, reference)
        before.append(Counter(pair.decode.call("counted")))
    first, now = before[1] - before[0], before[-1] - before[1]
    # The decode engine may begin to read for the first one before it notices.
    assert first["tickets gone"] + first["tickets failed"] == 1
    assert {name: n for name, n in now.items() if name.startswith("tickets")} == {"tickets gone": 2}
