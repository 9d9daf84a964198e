"""kv_transfer_params: an offer, none, or a ProtocolError; nothing else, whatever a router sends."""

import json
from types import SimpleNamespace

import msgspec
import pytest
from hypothesis import given, settings, strategies as st

from kvferry.engines.vllm.offer import (
    Lease,
    Offer,
    not_of_peer,
    not_of_prompt,
    read_offer,
    wants_prefill,
    write_nothing,
    write_offer,
)
from kvferry.engines.vllm.prompt import digest_of
from kvferry.errors import ProtocolError
from kvferry.transport.handshake import Known
from kvferry.transport.lease import Ticket
from transport.cards import cards, facts

OFFER = Offer(
    "engine", "request", "127.0.0.1", 5600, [[1, 2, 3], [0, 0, 4], [9]], 40, Lease(3, 7, 11), "ab12", 2, 1
)
QUICK = settings(deadline=None, derandomize=True, database=None, max_examples=300)


def test_what_is_written_is_read_even_after_json():
    assert read_offer(write_offer(OFFER)) == OFFER
    assert read_offer(json.loads(json.dumps(write_offer(OFFER)))) == OFFER


def test_an_offer_holds_the_ticket():
    assert OFFER.remote_lease.ticket() == Ticket(3, 7, 11)


def test_keys_mean_what_they_mean_to_routers_made_for_vllm():
    params = write_offer(OFFER)
    assert params["do_remote_prefill"] is True
    assert params["do_remote_decode"] is False
    known = {
        "remote_engine_id",
        "remote_request_id",
        "remote_host",
        "remote_port",
        "remote_block_ids",
        "tp_size",
    }
    assert known <= params.keys()


def test_keys_that_a_router_adds_do_not_matter():
    assert read_offer({**write_offer(OFFER), "router": "mine", "x": [1]}) == OFFER


@pytest.mark.parametrize(
    "params",
    [
        None,
        {},
        {"do_remote_prefill": False},
        {"do_remote_prefill": None},
        {"do_remote_decode": True},
        write_nothing(),
    ],
)
def test_no_offer_is_none(params):
    assert read_offer(params) is None


@pytest.mark.parametrize(
    ("params", "wants"),
    [
        ({"do_remote_decode": True}, True),
        ({"do_remote_decode": 1}, False),
        ({"do_remote_decode": "true"}, False),
        ({}, False),
        (None, False),
        ([], False),
        ("do_remote_decode", False),
        (write_offer(OFFER), False),
    ],
)
def test_a_prefill_is_wanted_only_by_true(params, wants):
    assert wants_prefill(params) is wants


@pytest.mark.parametrize(
    "key", [key for key in write_offer(OFFER) if not key.startswith(("do_", "tp_", "pp_"))]
)
def test_an_offer_without_something_is_refused_by_its_name(key):
    params = write_offer(OFFER)
    del params[key]
    with pytest.raises(ProtocolError, match=rf"kv_transfer_params: .*{key}"):
        read_offer(params)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("remote_port", 0), ("remote_port", 65536), ("remote_port", "5600"), ("remote_port", None),
        ("remote_block_ids", None), ("remote_block_ids", [1, 2]), ("remote_block_ids", [[-1]]),
        ("remote_block_ids", [[2**31]]), ("remote_block_ids", [["1"]]), ("remote_block_ids", [[1.5]]),
        ("remote_num_tokens", -1), ("remote_num_tokens", 2**70), ("remote_num_tokens", True),
        ("remote_lease", {}), ("remote_lease", [3, 7, 11]),
        ("remote_lease", {"slot": -1, "generation": 0, "incarnation": 0}),
        ("remote_lease", {"slot": 0, "generation": 2**32, "incarnation": 0}),
        ("remote_lease", {"slot": 0, "generation": 0, "incarnation": 2**32}),
        ("remote_digest", 5), ("remote_engine_id", None), ("remote_request_id", b"bytes"),
        ("remote_host", 7), ("remote_host", ""), ("remote_host", "two words"), ("remote_host", "x" * 300),
        ("remote_host", "\ud800"), ("remote_host", "nul\0"), ("remote_host", "a;b"),
    ],
)  # fmt: skip
def test_a_value_that_makes_no_sense_is_refused_by_its_name(key, value):
    with pytest.raises(ProtocolError, match=rf"kv_transfer_params: .*{key}"):
        read_offer({**write_offer(OFFER), key: value})


@pytest.mark.parametrize(
    "host", ["localhost", "10.0.0.1", "node-7.rack_2.example.org", "::1", "fe80::1%eth0"]
)
def test_hosts_of_every_kind_are_taken(host):
    assert read_offer({**write_offer(OFFER), "remote_host": host}).remote_host == host


@pytest.mark.parametrize("params", [[], "text", 5, True, [write_offer(OFFER)]])
def test_what_is_no_object_is_refused(params):
    with pytest.raises(ProtocolError):
        read_offer(params)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=6),
    lambda inside: st.lists(inside, max_size=3) | st.dictionaries(st.text(max_size=6), inside, max_size=3),
    max_leaves=6,
)


@QUICK
@given(JSON)
def test_any_json_is_an_offer_none_or_a_protocol_error(params):
    try:
        assert read_offer(params) is None
    except ProtocolError:
        return


@QUICK
@given(st.dictionaries(st.sampled_from(sorted(write_offer(OFFER))), JSON, min_size=1, max_size=3))
def test_an_offer_with_anything_in_place_of_anything_is_read_or_a_protocol_error(changes):
    try:
        read_offer({**write_offer(OFFER), **changes})
    except ProtocolError:
        return


def prompt(*tokens: int) -> SimpleNamespace:
    return SimpleNamespace(
        prompt_token_ids=list(tokens), num_prompt_tokens=len(tokens), lora_request=None, mm_features=()
    )


def offer_of(request: SimpleNamespace, tokens: int) -> Offer:
    return msgspec.structs.replace(OFFER, remote_num_tokens=tokens, remote_digest=digest_of(request, tokens))


def test_an_offer_is_of_a_prompt_that_begins_with_its_tokens():
    offer = offer_of(prompt(1, 2, 3, 4), 3)
    assert not_of_prompt(offer, prompt(1, 2, 3, 9, 9)) is None
    assert "hold other tokens than this prompt" in not_of_prompt(offer, prompt(1, 2, 9, 4))
    assert not_of_prompt(offer, prompt(1, 2)) == "3 tokens are offered for a prompt of 2"


def test_an_offer_of_no_tokens_is_of_no_prompt():
    assert not_of_prompt(offer_of(prompt(1), 0), prompt(1)) == "0 tokens are offered for a prompt of 1"


def test_an_offer_is_not_of_a_prompt_without_token_ids():
    request = SimpleNamespace(prompt_token_ids=None, num_prompt_tokens=99)
    assert not_of_prompt(OFFER, request) == "the prompt is not made of token ids"


@pytest.mark.parametrize(
    ("found", "says"),
    [
        (facts("engine", 11), None),
        (facts("another", 11), "engine another answers at the address of engine"),
        (facts("engine", 12), "the engine has been restarted since it made the offer"),
    ],
    ids=["itself", "another engine", "another run"],
)
def test_an_offer_is_of_the_run_of_the_engine_that_made_it(found, says):
    offer = msgspec.structs.replace(OFFER, remote_block_ids=[[1]])
    assert not_of_peer(offer, Known(found, cards())) == says


def test_an_offer_has_a_block_table_for_each_group_of_the_peer():
    peer = Known(facts("engine", 11), cards())
    assert not_of_peer(OFFER, peer) == "block tables for 3 groups, the peer has 1"
