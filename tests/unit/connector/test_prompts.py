"""Chunk keys of requests: only requests of certain content have keys."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from kvferry.connector.content import Adapters, Prompts, TurnNames
from kvferry.geometry.canonical import canonical_form_of
from kvferry.keys.tenant import NOBODY, tenant_of, tenant_of_key
from kvferry.tools.models.layout import EngineShape, lay_out
from support.block_pool import request
from support.lora import adapter, slow_files
from support.mm import feature
from support.models import attention, model

CAT, DOG = [1.0, 2.0], [1.0, 3.0]
CANONICAL = canonical_form_of(lay_out(model(attention()), EngineShape(1, (1,), 4, "LBHNC", 9)), 4)


def key(one, prompts=None):
    """Of its first chunk, None if it has none."""
    prompts = prompts or Prompts(CANONICAL, Adapters())
    chunks = prompts.add(one)
    while prompts.are_pending(one.request_id):
        chunks = prompts.get(one)
    return chunks and chunks.key(0, 0)


def tokens(**more):
    return request("a", range(8), **more)


def test_equal_prompts_have_equal_names_and_others_have_not():
    names = [
        key(tokens()),
        key(request("a", range(1, 9))),
        key(tokens(cache_salt="tenant")),
        key(tokens(mm_features=[feature(1, CAT)])),
        key(tokens(mm_features=[feature(1, DOG)])),
        key(tokens(mm_features=[feature(2, DOG)])),
    ]
    assert len(set(names)) == len(names)
    assert key(tokens()) == names[0]


@pytest.mark.parametrize(
    "more",
    [
        {"prompt_token_ids": None},
        {"prompt_embeds": object()},
        {"resumable": True},
        {"all_token_ids": [1, -1, 2, 3]},
        {"all_token_ids": [1, 1 << 32, 2, 3]},
        {"mm_features": [feature(-1, CAT)]},
        {"mm_features": [feature(1, None)]},
    ],
)
def test_an_unnameable_prompt_has_no_chunks(more):
    prompts = Prompts(CANONICAL, Adapters())
    one = tokens(**more)
    assert prompts.add(one) is None
    assert prompts.get(one) is None


def test_a_growing_request_has_keys_for_its_known_tokens():
    prompts = Prompts(CANONICAL, Adapters())
    one = request("a", range(6))
    prompts.add(one)
    one.all_token_ids, one.num_tokens = list(range(9)), 8
    chunks = prompts.get(one)
    assert len(chunks.keys) == 8
    assert chunks.key(0, 1) == Prompts(CANONICAL, Adapters()).add(tokens()).key(0, 1)


def test_generated_tokens_have_no_names_where_they_see_less_than_a_prompts():
    prompts = Prompts(CANONICAL, Adapters(), prompts_only=True)
    one = request("a", range(8))
    prompts.add(one)
    assert prompts.get(one).key(0, 1) == Prompts(CANONICAL, Adapters()).add(tokens()).key(0, 1)
    one.all_token_ids, one.num_tokens = list(range(9)), 9
    assert prompts.get(one) is None
    turns, plain = TurnNames(Adapters(), prompts_only=True), TurnNames(Adapters())
    assert turns.content(one, 9) is None
    assert turns.content(one, 8) == plain.content(one, 8) is not None
    assert plain.content(one, 9) is not None


def test_a_request_has_no_chunks_after_an_unknown_token():
    prompts = Prompts(CANONICAL, Adapters())
    one = tokens()
    prompts.add(one)
    one.all_token_ids, one.num_tokens = [*range(8), -1], 9
    assert prompts.get(one) is None
    one.all_token_ids = list(range(9))
    assert prompts.get(one) is None


def test_after_a_reset_nothing_kept_before_is_found_and_running_requests_have_no_chunks():
    prompts = Prompts(CANONICAL, Adapters())
    before, salted = key(tokens(), prompts), key(tokens(cache_salt="x"), prompts)
    prompts.start_anew()
    assert prompts.get(tokens()) is None
    assert key(tokens(), prompts) not in (before, salted)
    assert key(tokens(), prompts) == key(tokens(), prompts)
    assert key(tokens(), prompts) != key(tokens(cache_salt="x"), prompts)
    again = key(tokens(), prompts)
    prompts.start_anew()
    assert key(tokens(), prompts) != again


def test_suspended_prompts_have_no_keys_until_a_reset():
    prompts = Prompts(CANONICAL, Adapters())
    before = key(tokens(), prompts)
    prompts.suspend("weights have changed")
    assert prompts.get(tokens()) is None
    assert prompts.why_unnamed("a") == "weights have changed"
    assert key(tokens(), prompts) is None
    assert prompts.why_unnamed("a") == "weights have changed"
    prompts.start_anew()
    assert key(tokens(), prompts) not in (None, before)


def test_an_adapter_is_named_by_its_weights_and_what_scales_them(tmp_path):
    names = [
        key(tokens()),
        key(tokens(lora_request=adapter(tmp_path / "one"))),
        key(tokens(lora_request=adapter(tmp_path / "other", weight=2.0))),
        key(tokens(lora_request=adapter(tmp_path / "third", rank=16))),
    ]
    assert len(set(names)) == 4
    assert key(tokens(lora_request=adapter(tmp_path / "copy"))) == names[1]


def test_an_adapter_that_is_not_on_this_disk_has_no_chunks_which_is_said_once(tmp_path, caplog):
    prompts = Prompts(CANONICAL, Adapters())
    away = SimpleNamespace(lora_name="away", lora_int_id=1, lora_path="some/hub-name", load_inplace=False)
    assert key(tokens(lora_request=away), prompts) is None
    assert key(tokens(lora_request=away), prompts) is None
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "LoRA away" in caplog.text


def test_an_adapter_whose_files_have_changed_has_no_chunks(tmp_path):
    prompts, one = Prompts(CANONICAL, Adapters()), adapter(tmp_path)
    first = key(tokens(lora_request=one), prompts)
    assert key(tokens(lora_request=one), prompts) == first
    adapter(tmp_path, weight=3.0)
    assert key(tokens(lora_request=one), prompts) is None
    assert key(tokens(lora_request=one)) not in (None, first), "another engine reads it for the first time"


def test_an_adapter_that_is_loaded_in_place_has_no_chunks(tmp_path):
    one = adapter(tmp_path)
    assert key(tokens(lora_request=one)) is not None
    one.load_inplace = True
    assert key(tokens(lora_request=one)) is None


def test_a_request_whose_adapter_is_replaced_in_place_has_no_chunks_from_then_on(tmp_path):
    adapters = Adapters()
    prompts, one = Prompts(CANONICAL, adapters), tokens(lora_request=adapter(tmp_path))
    assert key(one, prompts)
    adapters.on_load(SimpleNamespace(**vars(one.lora_request) | {"load_inplace": True}))
    assert prompts.get(one) is None
    assert prompts.why_unnamed("a") == "its LoRA was replaced in place since it came in"


def test_chunks_have_names_as_soon_as_the_adapter_was_read(tmp_path):
    prompts, one = Prompts(CANONICAL, Adapters()), tokens(lora_request=adapter(tmp_path))
    with slow_files() as go_on:
        assert prompts.add(one) is None
        assert prompts.get(one) is None
        assert prompts.are_pending("a")
        assert "still being read" in prompts.why_unnamed("a")
        go_on.set()
        assert key(one, prompts) == key(one)
    assert not prompts.are_pending("a")


def test_a_prompt_without_keys_has_a_reason_until_it_ends():
    prompts, one = Prompts(CANONICAL, Adapters()), tokens(prompt_embeds=object())
    prompts.add(one)
    assert prompts.why_unnamed("a") == "the prompt is not made of token ids"
    assert not prompts.are_pending("a")
    prompts.remove("a")
    assert prompts.why_unnamed("a") == "the cache was reset since it came in"


def test_a_forgotten_salt_has_other_names_from_then_on_and_other_salts_keep_theirs():
    prompts = Prompts(CANONICAL, Adapters())
    one, other = tokens(cache_salt="tenant"), request("b", range(8))
    before = [key(one, prompts), key(other, prompts)]
    prompts.forget_salt("tenant")
    assert prompts.get(one) is None, "its blocks may hold KV of before"
    assert prompts.get(other).key(0, 0) == before[1]
    assert key(tokens(cache_salt="tenant"), prompts) not in before
    assert prompts.chunks_of(request("c", range(8))).key(0, 0) == before[1]
    prompts.forget_salt("")
    assert prompts.get(other) is None


def test_a_key_has_the_tenant_of_its_request(tmp_path):
    lora = adapter(tmp_path / "a", name="sql-a")
    for more, expected in (
        ({}, NOBODY),
        ({"cache_salt": "x"}, tenant_of("x", None)),
        ({"lora_request": lora}, tenant_of(None, "sql-a")),
        ({"lora_request": lora, "cache_salt": "x"}, tenant_of("x", None)),
    ):
        assert tenant_of_key(key(tokens(**more))) == expected


def test_the_tenant_stays_when_keys_change_with_a_reset():
    prompts = Prompts(CANONICAL, Adapters())
    before = key(tokens(cache_salt="x"), prompts)
    prompts.start_anew()
    after = key(tokens(cache_salt="x"), prompts)
    assert before != after
    assert tenant_of_key(before) == tenant_of_key(after) == tenant_of("x", None)
