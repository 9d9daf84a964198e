"""kv_transfer_params are an offer, none, or a ProtocolError, for any JSON."""

import json
import uuid
from types import SimpleNamespace

import msgspec
import pytest
from hypothesis import given, strategies as st
from msgspec import structs

from kvferry.common.errors import ProtocolError, Unnameable
from kvferry.connector.content import Adapters, content_of
from kvferry.transport.offer import Offer, read_offer, wants_prefill, write_nothing, write_offer
from kvferry.transport.redeem import PromptContent
from support.block_pool import MadeUpRequest
from support.examples import examples
from support.lora import adapter, once_named
from support.mm import feature

TICKET = bytes(range(16))
OFFER = Offer("engine", "127.0.0.1", 5600, TICKET.hex(), 40, 2048)
OPTIONAL = {"do_remote_prefill", "do_remote_decode"}
LATER = "remote_step_tokens"
"""A key that older releases do not write."""
QUICK = examples(60)


def test_an_offer_survives_json():
    assert read_offer(write_offer(OFFER)) == OFFER
    assert read_offer(json.loads(json.dumps(write_offer(OFFER)))) == OFFER


def test_keys_mean_what_they_mean_to_routers_made_for_vllm():
    assert write_offer(OFFER) == {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": "engine",
        "remote_host": "127.0.0.1",
        "remote_port": 5600,
        "remote_request_id": "000102030405060708090a0b0c0d0e0f",
        "remote_num_tokens": 40,
        "remote_step_tokens": 2048,
    }


def test_an_offer_of_any_length_takes_less_than_350_bytes():
    """Block tables of 131,072 tokens were 50 KiB of JSON, and no longer pass through users."""
    long = Offer(str(uuid.UUID(int=0)), "fe80:1234:5678:9abc:def0::1", 65_535, "f" * 32, 131_072, 8192)
    by_vllm = {"remote_prefill_cached_tokens": 131_071}
    assert len(json.dumps({**write_offer(long), **by_vllm})) < 350


def test_a_sealed_grant_is_carried_unread_whatever_its_length():
    for sealed in ("", "c2VhbGVk", "x" * 100_000):
        one = structs.replace(OFFER, remote_sealed_grant=sealed)
        assert read_offer(json.loads(json.dumps(write_offer(one)))) == one


def test_an_older_release_reads_an_offer_with_a_sealed_grant():
    fields = [(one.name, one.type, one.default) for one in structs.fields(Offer)]
    older = msgspec.defstruct("Offer", [one for one in fields if one[0] != "remote_sealed_grant"])
    sealed = write_offer(structs.replace(OFFER, remote_sealed_grant="c2VhbGVk"))
    assert msgspec.convert(sealed, older).remote_request_id == OFFER.remote_request_id


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


@pytest.mark.parametrize("key", [key for key in write_offer(OFFER) if key not in OPTIONAL | {LATER}])
def test_an_offer_without_a_key_is_refused_with_its_name(key):
    params = write_offer(OFFER)
    del params[key]
    with pytest.raises(ProtocolError, match=rf"kv_transfer_params: {key} missing; send what .* release"):
        read_offer(params)


def test_an_offer_of_an_older_release_is_read_and_left_to_the_handshake():
    older = {key: value for key, value in write_offer(OFFER).items() if key != LATER}
    assert read_offer(older) == structs.replace(OFFER, remote_step_tokens=0)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("remote_port", 0), ("remote_port", 65536), ("remote_port", "5600"), ("remote_port", None),
        ("remote_prefill_cached_tokens", -1), ("remote_prefill_cached_tokens", "4"),
        ("remote_prefill_cached_tokens", True), ("remote_prefill_cached_tokens", 2**31),
        ("remote_num_tokens", -1), ("remote_num_tokens", 2**70), ("remote_num_tokens", True),
        ("remote_num_tokens", 0), ("remote_num_tokens", "40"), ("remote_num_tokens", 4.5),
        ("remote_engine_id", None), ("remote_engine_id", ""), ("remote_engine_id", "x" * 257),
        ("remote_engine_id", "two\nlines"), ("remote_engine_id", "a\x1b[31m"), ("remote_engine_id", "\ud800"),
        ("remote_request_id", b"bytes"), ("remote_request_id", TICKET), ("remote_request_id", "f" * 31),
        ("remote_request_id", "f" * 33), ("remote_request_id", "F" * 32),
        ("remote_request_id", "f" * 32 + "\n"),
        ("remote_request_id", "g" * 32), ("remote_request_id", ["f" * 32]), ("remote_request_id", None),
        ("remote_request_id", "x" * 40_000_000),
        ("remote_host", 7), ("remote_host", ""), ("remote_host", "two words"), ("remote_host", "x" * 300),
        ("remote_host", "\ud800"), ("remote_host", "nul\0"), ("remote_host", "a;b"),
        ("remote_sealed_grant", 7), ("remote_sealed_grant", None), ("remote_sealed_grant", ["c2VhbGVk"]),
    ],
)  # fmt: skip
def test_an_invalid_value_is_refused_with_its_name(key, value):
    with pytest.raises(ProtocolError, match=rf"kv_transfer_params: invalid value of {key};"):
        read_offer({**write_offer(OFFER), key: value})


@pytest.mark.parametrize(
    "host", ["localhost", "10.0.0.1", "node-7.rack_2.example.org", "::1", "fe80::1%eth0"]
)
def test_hosts_of_every_kind_are_taken(host):
    assert read_offer({**write_offer(OFFER), "remote_host": host}).remote_host == host


@pytest.mark.parametrize("key", [key for key in write_offer(OFFER) if key not in OPTIONAL])
def test_text_that_is_not_unicode_is_refused(key):
    sent = json.loads(
        json.dumps({**write_offer(OFFER), key: "half of a pair"}).replace("half of a pair", r"\ud800")
    )
    with pytest.raises(ProtocolError, match="kv_transfer_params: "):
        read_offer(sent)


def test_a_refusal_repeats_neither_the_ticket_nor_what_a_user_sent():
    for key, value in (("remote_request_id", "a1b2" * 9), ("remote_engine_id", "a1b2" * 99)):
        with pytest.raises(ProtocolError) as refused:
            read_offer({**write_offer(OFFER), key: value})
        assert "a1b2" not in str(refused.value)
        assert TICKET.hex() not in str(refused.value)


@pytest.mark.parametrize("params", [[], "text", 5, True, [write_offer(OFFER)]])
def test_a_setting_that_is_no_object_is_refused(params):
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
def test_an_offer_with_a_changed_value_is_read_or_a_protocol_error(changes):
    try:
        read_offer({**write_offer(OFFER), **changes})
    except ProtocolError:
        return


def prompt(*tokens: int, items=(), lora=None, salt=None) -> SimpleNamespace:
    return MadeUpRequest(prompt_token_ids=list(tokens), lora_request=lora, mm_features=items, cache_salt=salt)


def content(request: MadeUpRequest, tokens: int, adapters: Adapters | None = None) -> PromptContent:
    return once_named(lambda: content_of(request, tokens, adapters or Adapters()))


def test_content_is_that_of_the_tokens_at_the_beginning():
    offered = content(prompt(1, 2, 3, 4), 3)
    assert content(prompt(1, 2, 3, 9, 9), 3).difference(offered) is None
    assert "hold other tokens than this prompt" in content(prompt(1, 2, 9, 4), 3).difference(offered)


def test_a_prompt_without_token_ids_has_no_content():
    with pytest.raises(Unnameable, match="the prompt is not made of token ids"):
        content_of(MadeUpRequest(prompt_token_ids=None), 3, Adapters())


def test_a_prompt_of_embeddings_has_no_content_though_it_has_token_ids():
    mixed = prompt(1, 2, 3, 4)
    mixed.prompt_embeds = object()
    with pytest.raises(Unnameable, match="the prompt is not made of token ids"):
        content_of(mixed, 3, Adapters())


def test_images_count_by_content_and_place():
    # The identifiers are those of engines whose model paths differ, which vLLM digests with the image.
    offered = content(prompt(1, 2, 3, 4, items=[feature(1, [1.0, 2.0], "a" * 64)]), 4)
    same = prompt(1, 2, 3, 4, items=[feature(1, [1.0, 2.0], "b" * 64)])
    assert content(same, 4).difference(offered) is None
    for other in ([feature(1, [1.0, 3.0], "a" * 64)], [feature(2, [1.0, 2.0], "a" * 64)], []):
        assert "hold other images" in content(prompt(1, 2, 3, 4, items=other), 4).difference(offered)


def test_images_beyond_what_is_offered_do_not_count():
    with_image = prompt(1, 2, 3, 4, items=[feature(2, [1.0, 2.0])])
    assert content(with_image, 2) == content(prompt(1, 2, 3, 4), 2)


def test_images_without_names_have_no_content():
    with pytest.raises(Unnameable):
        content_of(prompt(1, 2, 3, 4, items=[feature(1, None)]), 4, Adapters())


def test_adapters_count_by_content(tmp_path):
    here, there = Adapters("in float32"), Adapters("in float32")
    offered = content(prompt(1, 2, lora=adapter(tmp_path / "there")), 2, there)
    copy = content(prompt(1, 2, lora=adapter(tmp_path / "copy", name="b")), 2, here)
    assert copy.difference(offered) is None
    other = content(prompt(1, 2, lora=adapter(tmp_path / "here", weight=2.0)), 2, here)
    assert "were computed with LoRA" in other.difference(offered)
    assert "this prompt has none" in content(prompt(1, 2), 2, here).difference(offered)


def test_an_adapter_name_that_no_message_can_hold_is_refused():
    with pytest.raises(Unnameable, match="the name of its LoRA adapter has 5000 characters, at most 4096"):
        content_of(prompt(1, 2), 2, SimpleNamespace(name=lambda _: "x" * 5000))


def test_tenants_are_kept_apart_by_their_cache_salt():
    offered = content(prompt(1, 2, salt="mine"), 2)
    assert content(prompt(1, 2, 3, salt="mine"), 2).difference(offered) is None
    for other in ("theirs", None, ""):
        assert "belong to another cache_salt" in content(prompt(1, 2, salt=other), 2).difference(offered)
