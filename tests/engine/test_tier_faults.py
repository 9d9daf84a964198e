"""Whatever happens to requests and tiers of a running engine: right answers, and nothing stays held."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvferry.cache.tier_queue import REFRESH_SECONDS
from support.vllm_engine.faulty import Case, Faulty, Plain
from support.vllm_engine.marks import engines
from support.vllm_engine.pair import prompt
from support.vllm_engine.tiered import chunk_files, spoil
from support.waiting import wait_for

DEADLINE = 2.0
PATIENCE = 20.0
SETTINGS = {"chunk_tokens": 64, "load_timeout_seconds": DEADLINE, "patience_seconds": PATIENCE}
CASES = (
    Case("gemma3", {"num_gpu_blocks_override": 100, "block_size": 64}, SETTINGS),
    Case("lfm2", {"num_gpu_blocks_override": 42}, SETTINGS, exact=False),
)
SHARED = prompt(256, 30)
TEXTS = [SHARED + prompt(n, 30 + n) for n in (60, 130, 200, 300, 400)]
"""Prompts that begin alike."""
LONG = [prompt(n, n) for n in (620, 624, 628, 632, 636)]
"""Prompts whose continuations do not fit the KV cache together: each needs another block soon."""
CONTINUED = 60
AT_AN_EDGE = prompt(383, 32)
"""What its last token sees begins in the block before the one that what comes after it would see."""
WHOLE = [prompt(256, 50 + n) for n in range(9)]
"""Prompts of whole chunks, which fill the KV cache together."""
LARGE = prompt(850, 31)
"""A prompt that needs more than half of the KV cache."""

pytestmark = engines("faulty", CASES[:1], CASES[1:])


@pytest.fixture(scope="module")
def faulty(
    request: pytest.FixtureRequest,
    running: object,
    checkpoints: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Faulty]:
    running.close()
    folder = tmp_path_factory.mktemp(str(request.param))
    plain = Plain(
        request.param,
        checkpoints,
        folder / "plain.log",
        [*TEXTS, *LONG, *WHOLE, LARGE, AT_AN_EDGE],
        CONTINUED,
    )
    engine = Faulty(request.param, checkpoints, folder, plain)
    yield engine
    engine.close()


@pytest.mark.parametrize("seed", [3, *(pytest.param(n, marks=pytest.mark.long) for n in (1, 2))])
def test_aborts_while_storing_and_loading_leave_nothing_held(faulty: Faulty, seed: int) -> None:
    faulty.forget(host=True)
    texts = [prompt(n, 100 * seed + n) for n in range(200, 700, 50)]
    faulty.engine.call("slow_copies", 0.05)
    stored = faulty.engine.call("abort_at_random", texts * 3, seed)
    assert stored["while storing"] > 2
    faulty.nothing_held()
    faulty.forget(host=seed == 3)
    loaded = faulty.engine.call("abort_at_random", texts * 3, seed)
    faulty.engine.call("slow_copies", 0)
    assert loaded.get("WAITING_FOR_REMOTE_KVS", 0) > 0
    faulty.nothing_held()
    faulty.right(TEXTS)
    faulty.nothing_held()
    assert all(tokens[0] > 0 for tokens in faulty.right(TEXTS).values())
    faulty.nothing_held()


def test_requests_preempted_during_stores_are_answered_correctly(faulty: Faulty) -> None:
    before = faulty.engine.call("preemptions")
    served = []
    for copying in (0.01, 0):
        faulty.engine.call("slow_copies", copying)
        hits = faulty.right(LONG, CONTINUED)
        served += [tokens > 0 for admissions in hits.values() for tokens in admissions[1:]]
        faulty.nothing_held()
    assert faulty.engine.call("preemptions") > before, "the block pool was large enough: nothing was shown"
    assert any(served), "no preempted request was served from the tiers"


def test_chunks_from_before_a_reset_are_not_used(faulty: Faulty) -> None:
    text = TEXTS[3]
    faulty.say(text)
    faulty.forget()
    assert faulty.say(text)["hit"][0] > 0
    assert faulty.engine.call("reset_all")
    files = len(list(faulty.directory.rglob("*.kv")))
    answer = faulty.say(text)
    assert answer["hit"] == [0]
    faulty.plain.agree(text, answer)
    assert len(list(faulty.directory.rglob("*.kv"))) > files, "stores did not go on"
    for host in (False, True):
        faulty.forget(host=host)
        again = faulty.say(text)
        assert again["hit"][0] > 0
        faulty.plain.agree(text, again)


def test_reset_discards_chunks_that_are_being_stored_or_loaded(faulty: Faulty) -> None:
    text, other = TEXTS[4], LONG[4]
    faulty.right([text])
    faulty.settle()
    faulty.forget()
    faulty.engine.call("slow_copies", 1.0)  # longer than a step takes
    names = faulty.engine.call("add", [text, other], [None, None])
    while not (faulty.engine.call("waiting_for_kv") and "stores" in faulty.engine.call("held")):
        assert not faulty.engine.call("steps", 1), "both have ended"
    assert not faulty.engine.call("reset_all"), "blocks are in use: vLLM says that it is not done"
    faulty.engine.call("slow_copies", 0)
    while faulty.engine.call("requests_left"):
        faulty.engine.call("steps", 1)
    assert names
    faulty.nothing_held()
    assert faulty.say(text)["hit"] == [0]
    assert faulty.say(other)["hit"] == [0]


def test_fully_stored_prompt_sees_its_whole_window(faulty: Faulty) -> None:
    faulty.say(AT_AN_EDGE)
    for begun in (0, 321):
        faulty.forget()
        faulty.say(AT_AN_EDGE[:begun] or TEXTS[0])
        faulty.right([AT_AN_EDGE])
    assert not faulty.engine.call("tier_counts")["loads"].get("failed")


def test_failed_load_is_retried_in_a_nearly_full_kv_cache(faulty: Faulty) -> None:
    start = LARGE[:768]
    for text in (start, LARGE) * 4:  # of a cache so small, not all that a step completes may be pinned
        faulty.say(text)
        faulty.forget()
    faulty.forget(host=True)
    (begun,) = faulty.say(start)["hit"]
    assert begun > 0, "host memory has a beginning now"
    faulty.forget()
    for paths in chunk_files(faulty.directory).values():
        for path in paths:
            spoil(path, with_checksum=False)
    ((first, *_),) = faulty.right([LARGE]).values()
    assert first >= begun
    assert faulty.engine.call("tier_counts")["missed"]["file corrupt"] > 0
    faulty.nothing_held()
    assert faulty.engine.call("reset_all")


def test_loads_leave_room_for_later_requests(faulty: Faulty) -> None:
    """One that has much to compute behind its load comes first, and holds all others up if it cannot."""
    texts = [TEXTS[2], *WHOLE]
    for text in (SHARED, *WHOLE):
        faulty.say(text)
    faulty.forget()
    faulty.engine.call("slow_copies", 0.2)
    try:
        faulty.right(texts)
    finally:
        faulty.engine.call("slow_copies", 0)
    faulty.nothing_held()


def test_hanging_reads_cost_one_deadline(faulty: Faulty) -> None:
    text, other = TEXTS[4], TEXTS[2]
    faulty.right([text, other])
    faulty.settle()
    faulty.forget(host=True)
    faulty.engine.call("hang", "get")
    ((first, *later),) = faulty.right([text]).values()
    assert first > 0
    assert later == [0], "one deadline has passed, not several"
    asked = faulty.engine.call("hanging")
    assert asked["get"]
    wait_for(lambda: faulty.engine.call("stuck") == [(True, False)])
    faulty.forget()
    assert list(faulty.right([other]).values()) == [[0]]
    assert faulty.engine.call("hanging") == asked, "a tier that is stuck was asked"
    faulty.engine.call("go_on")
    faulty.nothing_held()
    assert faulty.engine.call("stuck") == [(False, False)]
    faulty.forget(host=True)
    assert all(hits[0] > 0 for hits in faulty.right([text, other]).values())
    faulty.nothing_held()


def test_hanging_writes_delay_no_answer(faulty: Faulty) -> None:
    assert faulty.engine.call("reset_all")
    faulty.engine.call("hang", "put")
    for _ in range(2):
        faulty.right(TEXTS)
    assert faulty.engine.call("hanging")["put"]
    faulty.engine.call("go_on")
    faulty.nothing_held()
    faulty.forget(host=True)
    assert any(hits[0] > 0 for hits in faulty.right(TEXTS).values())


@pytest.mark.long
def test_replaced_directory_costs_only_its_chunks(faulty: Faulty) -> None:
    text, away = TEXTS[4], faulty.directory.with_name("away")
    faulty.right([text])
    faulty.settle()
    faulty.forget(host=True)
    faulty.directory.rename(away)
    try:
        faulty.right([text, *TEXTS[:2]])  # the first load finds that its chunks have gone
        faulty.nothing_held()
        assert not faulty.directory.exists(), "it was made again"
    finally:
        faulty.directory.mkdir()
    time.sleep(REFRESH_SECONDS + 1)
    for served in (False, True):
        faulty.forget(host=True)
        hits = faulty.right([text])
        assert all((tokens[0] > 0) is served for tokens in hits.values()), hits
        faulty.nothing_held()
    assert list(faulty.directory.rglob("*.kv")), "it was not filled"
    shutil.rmtree(faulty.directory)
    away.rename(faulty.directory)
    time.sleep(REFRESH_SECONDS + 1)
    faulty.forget(host=True)
    assert all(tokens[0] > 0 for tokens in faulty.right([text]).values()), "what is back is not used"
    faulty.nothing_held()
