"""Adapters are named by content; their files are read by a thread."""

from __future__ import annotations

import os
from types import SimpleNamespace
from unittest import mock

import pytest
from vllm.lora.request import LoRARequest
from vllm.v1.executor import Executor

from kvferry.common.errors import ConfigError, NotYetNamed, Unnameable
from kvferry.connector import content as module
from kvferry.connector.content import AGAIN_SECONDS, Adapters
from kvferry.engines.vllm.compat.model import hook_adapter_loads
from support.clock import Clock
from support.lora import adapter, once_named, slow_files

LORA = {"lora_name": "a", "lora_int_id": ord("a"), "load_inplace": False}


def name(one, adapters=None):
    adapters = adapters or Adapters()
    return once_named(lambda: adapters.name(one))


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


def test_names_of_adapters_include_the_engines_settings(tmp_path):
    one = adapter(tmp_path)
    assert name(one, Adapters("in float32")) != name(one, Adapters("in bfloat16"))


def test_a_caller_does_not_wait_for_the_files_of_an_adapter(tmp_path):
    one, other, adapters = adapter(tmp_path / "one"), adapter(tmp_path / "other", weight=2.0), Adapters()
    with slow_files() as go_on:
        for each in (one, other, one):
            with pytest.raises(NotYetNamed, match="LoRA a are still being read"):
                adapters.name(each)  # the files cannot be read before `go_on` is set
        go_on.set()
        assert name(one, adapters) != name(other, adapters)


def test_an_adapter_without_weights_is_unnameable_for_good(tmp_path):
    one = adapter(tmp_path)
    (tmp_path / "adapter_model.safetensors").unlink()
    with pytest.raises(Unnameable, match="not on this machine's disk") as raised:
        name(one)
    assert not isinstance(raised.value, NotYetNamed)


def test_an_adapter_that_cannot_be_read_is_read_again_after_a_while(tmp_path):
    one, clock = adapter(tmp_path), Clock()
    adapters, config = Adapters(clock=clock), tmp_path / "adapter_config.json"
    with (
        mock.patch.object(module, "weights_of", side_effect=ConfigError("weights cannot be read: I/O error")),
        pytest.raises(Unnameable, match="or cannot be read"),
    ):
        name(one, adapters)
    with pytest.raises(Unnameable, match="or cannot be read"):
        name(one, adapters)
    clock.now += AGAIN_SECONDS
    assert name(one, adapters) == name(one)
    config.write_text("{}")
    with pytest.raises(Unnameable, match="have changed since"):
        name(one, adapters)


def test_files_that_changed_after_a_read_that_failed_have_no_name(tmp_path):
    """The engine may have read what was there before."""
    one, clock = adapter(tmp_path), Clock()
    adapters = Adapters(clock=clock)
    with (
        mock.patch.object(module, "weights_of", side_effect=ConfigError("weights cannot be read: I/O error")),
        pytest.raises(Unnameable),
    ):
        name(one, adapters)
    adapter(tmp_path, weight=2.0)
    clock.now += AGAIN_SECONDS
    with pytest.raises(Unnameable):
        name(one, adapters)


def test_an_adapter_written_later_gets_a_name(tmp_path):
    clock = Clock()
    one, adapters = SimpleNamespace(**LORA, lora_path=str(tmp_path / "later")), Adapters(clock=clock)
    with pytest.raises(Unnameable, match="not on this machine's disk"):
        name(one, adapters)
    there = adapter(tmp_path / "later")
    clock.now += AGAIN_SECONDS
    assert name(one, adapters) == name(there)


def test_an_adapter_whose_files_changed_after_it_was_loaded_has_no_name(tmp_path):
    """It loads an adapter when it is told to, which may be long before the first request."""
    one, adapters = adapter(tmp_path), Adapters()
    adapters.on_load(one)
    adapter(tmp_path, weight=2.0)
    for file in tmp_path.iterdir():  # files written within a few milliseconds may have one time
        os.utime(file, ns=(0, file.stat().st_mtime_ns + 10**9))
    with pytest.raises(Unnameable, match="have changed since"):
        name(one, adapters)


def test_an_adapter_that_was_replaced_in_place_has_no_name_any_more(tmp_path):
    one, other, adapters = adapter(tmp_path / "1"), adapter(tmp_path / "2", name="b"), Adapters()
    assert name(one, adapters)
    assert adapters.is_current(one)
    assert adapters.is_current(None)
    adapters.on_load(SimpleNamespace(**LORA | {"load_inplace": True}, lora_path=str(tmp_path / "3")))
    with pytest.raises(Unnameable, match="loaded in place"):
        name(one, adapters)
    assert not adapters.is_current(one)
    assert name(other, adapters)
    again = SimpleNamespace(**LORA | {"lora_int_id": 7}, lora_path=str(tmp_path / "1"))
    assert name(again, adapters), "it was unloaded, and loaded under another number"


def test_vllm_reports_an_adapter_before_the_workers_load_it(tmp_path):
    told = []

    class Workers:
        def collective_rpc(self, method, args):
            assert told == [args[0]]
            return [method == "add_lora"]

    class Listener:
        def on_load(self, lora):
            told.append(lora)

    listener = Listener()
    hook_adapter_loads(listener)
    hook_adapter_loads(listener)
    asked = LoRARequest("a", 1, str(tmp_path))
    assert Executor.add_lora(Workers(), asked)
    assert told == [asked]
    del listener
    assert Executor.add_lora(Workers(), asked)
    assert told == [asked], "a listener that is gone hears nothing"
