"""Hints of requests, as clients send them."""

from __future__ import annotations

import pytest
from vllm.v1.kv_hints import KvHintAction, KvHintsEnvelope

from kvferry.common.errors import ProtocolError
from kvferry.connector.engine import PlainRequest
from kvferry.connector.hints import NO_HINTS, Hints, HintSpan, read_hints, session_of
from support.block_pool import request

GIVEN = {"spans": [{"end": 512, "retain_seconds": 60, "priority": 3}], "prefetch": "session"}
READ = Hints(spans=(HintSpan(end=512, retain_seconds=60.0, priority=3),), prefetch="session")


def envelope(*actions):
    return KvHintsEnvelope("0.1", "m", [KvHintAction("1", *action) for action in actions])


def test_hints_come_in_kv_transfer_params_or_in_an_action_of_vllms_kv_hints():
    assert read_hints(request("a", range(8), kv_transfer_params={"hints": GIVEN})) == READ
    hinted = request("a", range(8), kv_hints=envelope(("kv.fetch", "1", {}), ("kvferry.hints", "1", GIVEN)))
    assert read_hints(hinted) == READ
    assert read_hints(PlainRequest(request_id="a", prompt_token_ids=[1], hints=GIVEN)) == READ


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"kv_transfer_params": {"do_remote_decode": True}},
        {"kv_transfer_params": "text"},
        {"kv_hints": envelope(("kvferry.hints", "2", GIVEN), ("kv.retain", "1", GIVEN))},
    ],
)
def test_requests_without_hints_have_none(more):
    assert read_hints(request("a", range(8), **more)) is NO_HINTS


@pytest.mark.parametrize(
    "wrong",
    [
        "text",
        [],
        {"span": []},
        {"spans": [{}] * 17},
        {"spans": [{"start": -1}]},
        {"spans": [{"end": 0}]},
        {"spans": [{"end": 1 << 40}]},
        {"spans": [{"retain_seconds": -1}]},
        {"spans": [{"retain_seconds": float("nan")}]},
        {"spans": [{"retain_seconds": 1e10}]},
        {"spans": [{"priority": 101}]},
        {"spans": [{"store": 0}]},
        {"spans": [{"ttl": 1}]},
        {"prefetch": True},
        {"prefetch": "\ud800"},
        {"ends_session": "yes"},
    ],
)
def test_malformed_hints_are_refused_in_one_sentence(wrong):
    with pytest.raises(ProtocolError, match=r"^hints: .{5,300}; send an object as in docs/hints.md") as error:
        read_hints(request("a", range(8), kv_transfer_params={"hints": wrong}))
    assert "\n" not in str(error.value)


def test_a_client_cannot_make_the_message_long():
    with pytest.raises(ProtocolError) as error:
        read_hints(request("a", range(8), kv_transfer_params={"hints": {"x" * 100_000: 1}}))
    assert len(str(error.value)) < 400


def test_a_session_belongs_to_its_salt():
    assert session_of(request("a", range(8), session_id="s")) == ("", "s")
    assert session_of(request("a", range(8), session_id="s", cache_salt="t")) == ("t", "s")
    for none in (None, "", "x" * 257, 3):
        assert session_of(request("a", range(8), session_id=none)) is None
