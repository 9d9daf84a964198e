"""Every chunk of a request is taken once, as soon as it is complete."""

from __future__ import annotations

from types import SimpleNamespace

from kvferry.connector.tiers.storing import Progress


def request(prompt: int, tokens: int = 0, computed: int = 0) -> SimpleNamespace:
    return SimpleNamespace(
        num_prompt_tokens=prompt,
        num_tokens=max(prompt, tokens),
        num_computed_tokens=computed,
        num_preemptions=0,
    )


def test_chunks_are_taken_once_and_the_tail_with_the_prompts_last_token():
    one = request(40)
    progress = Progress(one)
    assert progress.step(24)
    assert (progress.take(16), progress.due) == ((range(1), False), 32)
    one.num_computed_tokens = 24
    assert not progress.step(4)
    one.num_computed_tokens = 28
    assert progress.step(12)
    assert (progress.take(16), progress.due) == ((range(1, 2), True), 48)
    assert progress.take(16) == (range(2, 2), False)


def test_a_prompt_that_ends_with_a_chunk_has_no_tail():
    progress = Progress(request(32))
    assert progress.step(32)
    assert (progress.take(16), progress.due) == ((range(2), False), 48)


def test_a_tail_that_is_due_before_the_next_chunk_is_not_missed():
    one = request(20)
    progress = Progress(one)
    assert progress.step(16)
    assert (progress.take(16), progress.due) == ((range(1), False), 20)


def test_tokens_that_are_drafted_and_not_there_are_not_taken():
    progress = Progress(request(40, tokens=41, computed=40))
    assert progress.step(9)
    assert progress.take(16) == (range(2), True)


def test_the_found_prefix_is_that_of_the_last_admission():
    one = request(40, computed=16)
    progress = Progress(one)
    progress.step(8)
    one.num_computed_tokens = 24
    progress.step(8)
    assert progress.found == 16
    one.num_preemptions, one.num_computed_tokens = 1, 32
    progress.step(8)
    assert progress.found == 32


def test_only_computed_chunks_of_an_ended_request_are_taken():
    one = request(64)
    progress = Progress(one)
    progress.step(64)
    one.num_computed_tokens = 33
    assert progress.end()
    assert progress.take(16) == (range(2), False)
    one.num_preemptions = 1
    assert not progress.end()
