"""The next turn of a conversation: its prefill engine reads the last answer where it was decoded."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from support.vllm_engine.inside import distance
from support.vllm_engine.marks import engines, with_second_runner
from support.vllm_engine.pair import SOON, Pair, Setup, connector, prompt

NO_CACHE = {"enable_prefix_caching": False}
SHORT_STEPS = {"max_num_batched_tokens": 256}
ANSWER = 24
STATES = ("nemotronh", "qwen3next", "lfm2")


def keeping(family: str, label: str, options: dict[str, Any], **more: Any) -> Setup:
    """A pair whose decode engine keeps turns."""
    keeps = {"kv_transfer_config": connector(turn_seconds=600.0, turn_share=0.5, verify_transfers=True)}
    verified = {"verify_transfers": True}
    return Setup(family, f"turns-{label}", options, connector=verified, decode_options=keeps, **more)


WINDOWS = keeping("gemma3", "cached", SHORT_STEPS, exact=True)
pytestmark = engines(
    "pair",
    with_second_runner(WINDOWS),
    [
        WINDOWS,
        keeping("nemotronh", "uncached", {**NO_CACHE, **SHORT_STEPS}),
        keeping("gptoss", "cached", SHORT_STEPS),
        keeping("dsv3", "cached", {}),
        keeping("qwen3next", "cached", SHORT_STEPS),
        keeping("lfm2", "uncached", {**NO_CACHE, **SHORT_STEPS}),
    ],
)


@pytest.fixture
def ended(pair: Pair) -> Iterator[None]:
    """Nothing is kept any more afterwards."""
    yield
    pair.prefill.call("spoil", None)
    assert not pair.decode.call("reset_prefix_cache"), "blocks are in use"
    pair.decode.call("reset_connector")
    assert pair.decode.call("busy")
    pair.decode.call("step", SOON)
    assert not pair.decode.call("busy")
    assert pair.decode.call("counters")["leases"] == 0
    assert pair.decode.call("reset_prefix_cache"), "all are free"


def first_turn(pair: Pair, text: list[int]) -> list[int]:
    """A prompt and its answer, which the decode engine has and keeps."""
    pair.prefill.call("wait_for_turns", SOON)
    (answer,) = pair.through([text], ANSWER)
    pair.decode.call("step", SOON)  # whatever was in flight has ended
    pair.prefill.call("new_loads")
    return text + answer["tokens"]


def alone(pair: Pair, text: list[int]) -> dict[str, Any]:
    """What the prefill engine says by itself."""
    pair.prefill.call("ask_for_turns", asks=False)
    (reference,) = pair.reference([text])
    pair.prefill.call("ask_for_turns", asks=True)
    return reference


def right(pair: Pair, answer: dict[str, Any], reference: dict[str, Any]) -> bool:
    """Whether an answer is the single engine's, as far as that engine agrees with itself."""
    apart, floor = distance(answer, reference), 0.0 if pair.setup.exact else 1e-3
    # Only if it is needed: the gap takes minutes to measure with the second runner.
    return apart <= floor or (not pair.setup.exact and apart <= floor + 2 * pair.gap)


@pytest.mark.usefixtures("ended")
def test_the_last_answer_is_read_from_the_engine_that_decoded_it(pair: Pair) -> None:
    said = first_turn(pair, prompt(300, 300))
    text = said + prompt(60, 60)
    reference = alone(pair, text)
    ((tables, tokens),) = pair.decode.call("kept_turns")
    assert tokens == len(said) - 1, "the last token's content was never computed"
    assert pair.decode.call("requests_left") == 0, "the engine has ended the request"
    assert not pair.decode.call("busy"), "and may rest"
    theirs = pair.decode.call("digests", tables, tokens)

    answers = []
    for spoiled in (None, 0):
        pair.prefill.call("reset_prefix_cache")
        pair.prefill.call("loaded")
        pair.prefill.call("spoil", spoiled)
        answers += pair.through([text])
        assert pair.prefill.call("new_loads") == [("peer", 0, tokens)]
        (ours,) = pair.prefill.call("loaded").values()
        assert ours == theirs, "bytes of every layer and field"
    assert right(pair, answers[0], reference)
    assert distance(answers[1], answers[0]) > 1e-3, "what was read is not used"


@pytest.mark.long
@pytest.mark.usefixtures("ended")
def test_longer_turn_replaces_a_shorter_and_only_missing_tokens_are_read(pair: Pair) -> None:
    said = first_turn(pair, prompt(300, 1))
    said = first_turn(pair, said + prompt(50, 2))
    ((_, tokens),) = pair.decode.call("kept_turns")
    assert tokens == len(said) - 1
    pair.through([said + prompt(50, 3)])
    ((source, local_tokens, total),) = pair.prefill.call("new_loads")
    assert (source, total) == ("peer", tokens)
    assert (local_tokens > 0) == pair.prefix_caching


@pytest.mark.long
@pytest.mark.usefixtures("ended")
def test_departing_conversation_reads_the_common_beginning_or_nothing(
    pair: Pair,
) -> None:
    said = first_turn(pair, prompt(300, 4))
    text = said[:320] + prompt(50, 5)
    reference = alone(pair, text)
    pair.prefill.call("reset_prefix_cache")
    (answer,) = pair.through([text])
    states = pair.setup.family in STATES
    assert pair.prefill.call("new_loads") == ([] if states else [("peer", 0, 320)])
    assert right(pair, answer, reference)


@pytest.mark.long
@pytest.mark.usefixtures("ended")
def test_other_conversations_find_no_turn(pair: Pair) -> None:
    first_turn(pair, prompt(300, 6))
    pair.through([prompt(400, 7)])
    assert pair.prefill.call("new_loads") == []
