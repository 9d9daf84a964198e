"""Which requests have chunks: those whose content is certain, each under its own names."""

from __future__ import annotations

import json
from types import SimpleNamespace

import numpy as np
import pytest

from kvferry.engines.vllm.prompts import Prompts
from kvferry.engines.vllm.turn_names import TurnNames
from kvferry.geometry.canonical import canonical_of
from kvferry.geometry.layout import EngineShape, lay_out
from support.block_pool import request
from support.models import attention, model

CANONICAL = canonical_of(lay_out(model(attention()), EngineShape(1, (1,), 4, "LBHNC", 9)), 4)


def key(one, prompts=None):
    """Of its first chunk, None if it has none."""
    chunks = (prompts or Prompts(CANONICAL)).add(one)
    return chunks and chunks.key(0, 0)


def tokens(**more):
    return request("a", range(8), **more)


def feature(at, name):
    return SimpleNamespace(mm_position=SimpleNamespace(offset=at, length=2), identifier=name)


def test_equal_prompts_have_equal_names_and_others_have_not():
    names = [
        key(tokens()),
        key(request("a", range(1, 9))),
        key(tokens(cache_salt="tenant")),
        key(tokens(mm_features=[feature(1, "cat")])),
        key(tokens(mm_features=[feature(1, "dog")])),
        key(tokens(mm_features=[feature(2, "dog")])),
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
        {"mm_features": [feature(-1, "cat")]},
    ],
)
def test_what_cannot_be_named_for_certain_has_no_chunks(more):
    prompts = Prompts(CANONICAL)
    one = tokens(**more)
    assert prompts.add(one) is None
    assert prompts.get(one) is None


def test_a_request_that_grows_is_named_as_far_as_it_is_known():
    prompts = Prompts(CANONICAL)
    one = request("a", range(6))
    prompts.add(one)
    one.all_token_ids, one.num_tokens = list(range(9)), 8
    chunks = prompts.get(one)
    assert len(chunks.keys) == 8
    assert chunks.key(0, 1) == Prompts(CANONICAL).add(tokens()).key(0, 1)


def test_generated_tokens_have_no_names_where_they_see_less_than_a_prompts():
    prompts = Prompts(CANONICAL, prompts_only=True)
    one = request("a", range(8))
    prompts.add(one)
    assert prompts.get(one).key(0, 1) == Prompts(CANONICAL).add(tokens()).key(0, 1)
    one.all_token_ids, one.num_tokens = list(range(9)), 9
    assert prompts.get(one) is None
    turns, plain = TurnNames(prompts_only=True), TurnNames()
    assert turns.content(one, 9) is None
    assert turns.content(one, 8) == plain.content(one, 8) is not None
    assert plain.content(one, 9) is not None


def test_a_request_that_grows_by_what_is_no_token_has_no_chunks_from_then_on():
    prompts = Prompts(CANONICAL)
    one = tokens()
    prompts.add(one)
    one.all_token_ids, one.num_tokens = [*range(8), -1], 9
    assert prompts.get(one) is None
    one.all_token_ids = list(range(9))
    assert prompts.get(one) is None


def test_after_a_reset_nothing_kept_before_is_found_and_running_requests_have_no_chunks():
    prompts = Prompts(CANONICAL)
    before, salted = key(tokens(), prompts), key(tokens(cache_salt="x"), prompts)
    prompts.start_anew()
    assert prompts.get(tokens()) is None
    assert key(tokens(), prompts) not in (before, salted)
    assert key(tokens(), prompts) == key(tokens(), prompts)
    assert key(tokens(), prompts) != key(tokens(cache_salt="x"), prompts)
    again = key(tokens(), prompts)
    prompts.start_anew()
    assert key(tokens(), prompts) != again


def adapter(folder, rank=8, weight=1.0):
    """A LoRA adapter on disk."""
    from safetensors.numpy import save_file

    folder.mkdir(exist_ok=True)
    save_file({"a": np.full(4, weight, np.float32)}, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps({"r": rank}))
    return SimpleNamespace(lora_name="a", lora_path=str(folder), load_inplace=False)


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
    prompts = Prompts(CANONICAL)
    away = SimpleNamespace(lora_name="away", lora_path="some/hub-name", load_inplace=False)
    assert key(tokens(lora_request=away), prompts) is None
    assert key(tokens(lora_request=away), prompts) is None
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "LoRA away" in caplog.text


def test_an_adapter_whose_files_have_changed_has_no_chunks(tmp_path):
    prompts, one = Prompts(CANONICAL), adapter(tmp_path)
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
