"""Adapters are named by content; their files are read by a thread."""

from __future__ import annotations

import time

import pytest

from kvferry.engines.vllm.adapters import Adapters
from kvferry.errors import NotYetNamed, Unnameable
from support.lora import adapter, settled, slow_files


def name(one, adapters=None):
    adapters = adapters or Adapters()
    return settled(lambda: adapters.name(one))


def test_no_adapter_has_an_empty_name():
    assert Adapters("in float32").name(None) == ""


def test_one_name_of_other_content_is_another_adapter(tmp_path):
    names = {
        name(adapter(tmp_path / "one")),
        name(adapter(tmp_path / "other", weight=2.0)),
        name(adapter(tmp_path / "third", rank=16)),
    }
    assert len(names) == 3
    assert name(adapter(tmp_path / "copy", name="b")) in names


def test_how_the_engine_applies_adapters_is_part_of_their_names(tmp_path):
    one = adapter(tmp_path)
    assert name(one, Adapters("in float32")) != name(one, Adapters("in bfloat16"))


def test_whoever_asks_does_not_wait_for_the_files(tmp_path):
    one, other, adapters = adapter(tmp_path / "one"), adapter(tmp_path / "other", weight=2.0), Adapters()
    with slow_files() as go_on:
        for each in (one, other, one):
            began = time.perf_counter()
            with pytest.raises(NotYetNamed, match="LoRA a are still being read"):
                adapters.name(each)
            assert time.perf_counter() - began < 1.0
        go_on.set()
        assert name(one, adapters) != name(other, adapters)


def test_what_can_never_be_named_is_told_apart_from_what_is_not_named_yet(tmp_path):
    one = adapter(tmp_path)
    (tmp_path / "adapter_model.safetensors").unlink()
    with pytest.raises(Unnameable, match="not on this machine's disk") as raised:
        name(one)
    assert not isinstance(raised.value, NotYetNamed)
