"""Tiers on both engines of a pair: what a peer gave is kept, and whoever has it serves."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import kvferry
from support.explain import events, explain
from support.open_to_others import held, open_to_others, session
from support.vllm_engine.both import Both, loads
from support.vllm_engine.inside import distance
from support.vllm_engine.lengths import block_ends, limit_admissions, of_each_length, through
from support.vllm_engine.marks import engines
from support.vllm_engine.pair import prompt

OWN, SHARED = "a directory each", "one directory"
pytestmark = engines("both", [SHARED], [OWN])


@pytest.fixture(scope="module")
def both(
    request: pytest.FixtureRequest,
    running: object,
    checkpoints: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Both]:
    running.close()
    folder = tmp_path_factory.mktemp("both")
    second = folder / ("one" if request.param == SHARED else "two")
    pair = Both((folder / "one", second), folder, checkpoints)
    yield pair
    pair.close()


def test_kv_from_a_peer_is_stored_and_served_without_the_peer(both: Both) -> None:
    asked, reference = both.own_words(prompt(512, 50))
    both.forget()
    stored = both.decode.call("tier_counts")["stored"]
    loads(both.decode)
    answer = both.through([asked])[0]
    assert loads(both.decode) == [len(asked) - 1]
    assert answer["moved"], "the peer was not asked"
    assert distance(answer, reference) == 0.0
    both.forget()
    assert both.decode.call("tier_counts")["stored"] > stored
    for host in (False, True):
        both.forget(host=host)
        (alone,) = both.decode.call("generate", [asked])
        assert loads(both.decode) == [len(asked)]
        assert distance(alone, reference) == 0.0
    both.nothing_held()


def test_files_sockets_and_shared_memory_are_the_users_alone(both: Both) -> None:
    both.through([both.own_words(prompt(512, 58))[0]])
    both.forget()
    has = held(pid for engine in both.engines for pid in session(engine.pid))
    # A socket is bound under another name, and renamed once it listens.
    sockets = {str(Path(name).with_suffix(".sock")) for name in has if name.endswith(".new")}
    assert len(sockets) == len(both.engines), has
    assert all(Path(name).is_socket() for name in sockets)
    made = [path for folder in both.folders for path in folder.rglob("*")]
    state = [*Path(os.environ["XDG_STATE_HOME"]).rglob("*")]
    assert {path.suffix for path in made} >= {".kv", ".json", ""}
    assert any(path.is_file() for path in state), "there is no key"
    source = Path(kvferry.__file__).parents[1]
    installed = (f"{sys.prefix}/", f"{sys.base_prefix}/", f"{source}/")  # anybody may read these, wherever
    engines = {
        name
        for name in has
        if name.startswith(("/dev/shm/", "/tmp/", "/run/", "@")) and not name.startswith(installed)
    }
    logs = {str(engine.log) for engine in both.engines}
    for path in (*made, *state):
        assert path.lstat().st_mode & 0o077 == 0, path
    assert open_to_others((engines | sockets) - logs) == {}


def test_explanation_names_every_bid_and_the_chosen_source(both: Both) -> None:
    text = prompt(512, 57)
    (first,) = both.decode.call("generate", [text[:200]])
    both.forget(host=True)
    (answer,) = both.through([text])
    both.forget()
    peer = next(event for name, event in events(answer["request_id"]) if name == "LoadEnded")
    assert (peer["began"]["source"], peer["outcome"]) == ("peer", "ready")
    assert {one["group"] for one in peer["moved"]} == {
        *(f"{number} sliding_window(64)" for number in range(5)),
        "5 full_attention",
    }
    said = " ".join(explain(answer["request_id"]).stdout.split())
    assert "peer bids 511 tokens (511 from peer), worth 511." in said
    assert "tiers bids 192 tokens (192 from file), worth 192." in said
    assert "is chosen: the best bid." in said
    assert "Scheduled: 511 tokens cached, 1 to compute." in said
    assert re.search(r"Stored 5 of 5 chunks of \d full_attention, [\d.]+ [KM]iB, until", said), said
    alone = " ".join(explain(first["request_id"]).stdout.split())
    assert "Everything is computed: no source has more." in alone
    assert "tiers bids nothing, not stored: chunk 0 of" in alone


def test_prefill_engine_hands_over_kv_from_its_tiers(both: Both) -> None:
    asked, reference = both.own_words(prompt(700, 51))
    both.forget(host=True)
    loads(both.prefill)
    answer = both.through([asked])[0]
    assert loads(both.prefill)[0] > 0
    assert distance(answer, reference) == 0.0
    both.forget(host=True)
    loads(both.decode)
    answer = both.through([asked[:400] + prompt(200, 59)])[0]
    assert loads(both.decode) == [599], "the whole prompt but its last token"
    assert answer["cached"] == loads(both.prefill)[0] > 0, "the prefill engine's tiers had the beginning only"
    both.nothing_held()


def test_tiers_serve_a_request_that_the_peer_refuses(both: Both) -> None:
    asked, reference = both.own_words(prompt(512, 52))
    both.through([asked])
    both.forget()
    (offer,) = [answer["params"] for answer in both.prefill.call("prefill", [asked])]
    loads(both.decode)
    (answer,) = both.decode.call("generate", [asked], [{**offer, "remote_engine_id": "someone else"}])
    assert loads(both.decode) == [len(asked)]
    assert not both.decode.call("loaded"), "the peer was believed"
    assert distance(answer, reference) == 0.0
    both.nothing_held()


@pytest.mark.long
def test_simultaneous_requests_from_peer_and_tiers_are_answered_correctly(both: Both) -> None:
    texts = [prompt(n, n) for n in (90, 130, 260, 333, 500, 640)]
    references = both.reference(texts)
    both.through(texts[:3])
    both.forget(host=True)
    for answer, reference in zip(both.through(texts), references, strict=True):
        both.agree(answer, reference)
    both.nothing_held()


def test_engine_finds_chunks_of_another_only_in_a_shared_directory(both: Both) -> None:
    asked, reference = both.own_words(prompt(512, 53))
    both.forget(host=True)
    loads(both.decode)
    (answer,) = both.decode.call("generate", [asked])
    assert (loads(both.decode)[0] > 0) == both.shared
    assert distance(answer, reference) == 0.0
    both.nothing_held()


@of_each_length
def test_prompt_of_any_length_gets_the_same_answer_again(
    both: Both, texts_of: Callable[[int, int], list[list[int]]]
) -> None:
    """Alone on either engine, and through both, with whatever tiers and peer have by then."""
    texts = texts_of(both.about["block_size"], 40_000)
    for engine in both.engines:
        limit_admissions(engine)
    references = both.prefill.call("generate", texts, tokens=2, timeout=240.0)
    both.forget()
    for ask in (
        lambda: both.prefill.call("generate", texts, tokens=2, timeout=240.0),
        lambda: both.decode.call("generate", texts, tokens=2, timeout=240.0),
        lambda: through(both, texts),
        lambda: through(both, texts),
    ):
        for text, answer, reference in zip(texts, ask(), references, strict=True):
            apart = distance(answer, reference)
            assert apart < 1e-4, f"{len(text)} tokens: {apart} apart"
        both.forget()
    control = block_ends(both.about["block_size"], 60_000 + 1000 * len(texts))[1:]  # no tier has them
    expected = both.prefill.call("generate", control, tokens=2, salt="apart")
    both.forget()
    both.decode.call("spoil", 5)
    try:
        spoiled = through(both, control)
    finally:
        both.decode.call("spoil", None)
    wrong = [
        len(text)
        for text, answer, reference in zip(control, spoiled, expected, strict=True)
        if answer["moved"] and distance(answer, reference) > 1e-4
    ]
    assert len(wrong) > len(control) // 2, "the answers do not depend on what was moved"
    both.nothing_held()
