"""kv_transfer_params: an offer, none, or a ProtocolError; nothing else, whatever a router sends."""

import json
from types import SimpleNamespace

import msgspec
import pytest
from hypothesis import given, settings, strategies as st

from kvferry.engines.vllm.adapters import Adapters
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
from kvferry.engines.vllm.prompt import content_of
from kvferry.errors import ProtocolError
from kvferry.transport.handshake import Known
from kvferry.transport.lease import LeaseWord
from support.lora import adapter, settled
from support.mm import feature
from transport.cards import cards, facts

OFFER = Offer(
    "engine", "request", "127.0.0.1", 5600, [[1, 2, 3], [0, 0, 4], [9]], 40, Lease(3, 7, 11), "ab12", 2, 1
)
OPTIONAL = {
    "do_remote_prefill", "do_remote_decode", "tp_size", "pp_size", "remote_items", "remote_adapter"
}  # fmt: skip
QUICK = settings(deadline=None, derandomize=True, database=None, max_examples=300)


def test_what_is_written_is_read_even_after_json():
    assert read_offer(write_offer(OFFER)) == OFFER
    assert read_offer(json.loads(json.dumps(write_offer(OFFER)))) == OFFER


def test_an_offer_holds_the_ticket():
    assert OFFER.remote_lease.ticket() == LeaseWord(3, 7, 11)


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


@pytest.mark.parametrize("key", [key for key in write_offer(OFFER) if key not in OPTIONAL])
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
        ("remote_items", 5), ("remote_adapter", None),
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


@pytest.mark.parametrize("key", ["remote_port", "remote_request_id", "remote_adapter"])
def test_text_that_is_not_unicode_is_refused(key):
    sent = json.loads(
        json.dumps({**write_offer(OFFER), key: "half of a pair"}).replace("half of a pair", r"\ud800")
    )
    with pytest.raises(ProtocolError, match="kv_transfer_params: text that is not Unicode"):
        read_offer(sent)


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


def prompt(*tokens: int, items=(), lora=None) -> SimpleNamespace:
    return SimpleNamespace(
        prompt_token_ids=list(tokens), num_prompt_tokens=len(tokens), lora_request=lora, mm_features=items
    )


def offer_of(request: SimpleNamespace, tokens: int, adapters: Adapters | None = None) -> Offer:
    content = settled(lambda: content_of(request, tokens, adapters))
    return msgspec.structs.replace(
        OFFER,
        remote_num_tokens=tokens,
        remote_digest=content.tokens,
        remote_items=content.items,
        remote_adapter=content.adapter,
    )


def mismatch(offer: Offer, request: SimpleNamespace, adapters: Adapters | None = None) -> str | None:
    return settled(lambda: not_of_prompt(offer, request, adapters or Adapters()))


def test_an_offer_is_of_a_prompt_that_begins_with_its_tokens():
    offer = offer_of(prompt(1, 2, 3, 4), 3, Adapters())
    assert mismatch(offer, prompt(1, 2, 3, 9, 9)) is None
    assert "hold other tokens than this prompt" in mismatch(offer, prompt(1, 2, 9, 4))
    assert mismatch(offer, prompt(1, 2)) == "3 tokens are offered for a prompt of 2"


def test_an_offer_of_no_tokens_is_of_no_prompt():
    assert mismatch(offer_of(prompt(1), 0, Adapters()), prompt(1)) == "0 tokens are offered for a prompt of 1"


def test_an_offer_is_not_of_a_prompt_without_token_ids():
    request = SimpleNamespace(prompt_token_ids=None, num_prompt_tokens=99)
    assert mismatch(OFFER, request) == "the prompt is not made of token ids"


def test_an_offer_is_of_a_prompt_with_the_same_images_by_content():
    # The identifiers are those of engines whose model paths differ, which vLLM digests with the image.
    offer = offer_of(prompt(1, 2, 3, 4, items=[feature(1, [1.0, 2.0], "a" * 64)]), 4, Adapters())
    assert mismatch(offer, prompt(1, 2, 3, 4, items=[feature(1, [1.0, 2.0], "b" * 64)])) is None
    for other in ([feature(1, [1.0, 3.0], "a" * 64)], [feature(2, [1.0, 2.0], "a" * 64)], []):
        assert "hold other images" in mismatch(offer, prompt(1, 2, 3, 4, items=other))


def test_images_beyond_what_is_offered_do_not_count():
    offer = offer_of(prompt(1, 2, 3, 4), 2, Adapters())
    assert mismatch(offer, prompt(1, 2, 3, 4, items=[feature(2, [1.0, 2.0])])) is None


def test_an_offer_is_not_of_a_prompt_whose_images_have_no_names():
    offer = offer_of(prompt(1, 2, 3, 4), 4, Adapters())
    assert "has no certain name" in mismatch(offer, prompt(1, 2, 3, 4, items=[feature(1, None)]))


def test_an_offer_is_of_a_prompt_with_the_same_adapter_by_content(tmp_path):
    here, there = Adapters("in float32"), Adapters("in float32")
    offer = offer_of(prompt(1, 2, lora=adapter(tmp_path / "there")), 2, there)
    assert mismatch(offer, prompt(1, 2, lora=adapter(tmp_path / "copy", name="b")), here) is None
    other = prompt(1, 2, lora=adapter(tmp_path / "here", weight=2.0))
    assert "were computed with LoRA" in mismatch(offer, other, here)
    assert "this prompt has none" in mismatch(offer, prompt(1, 2), here)


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
