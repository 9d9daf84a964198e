"""Memory that is registered for transfers is compared with the tensors that vLLM's layers compute in."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvferry.common.errors import ConfigError
from kvferry.connector.messages import MOVED
from kvferry.engines.vllm import worker as worker_module
from kvferry.engines.vllm.cache_guard import CacheGuard
from kvferry.engines.vllm.worker import VLLMWorker
from kvferry.geometry import Group, GroupKind, Layer, RankGeometry, Region, opaque_page

BLOCKS, PAGE = 8, 2 * 16 * 32 * 4
"""Two heads, 16 tokens, 32 float32."""


class BoundLayers:
    """A dense layer and one with two recurrent states, in one allocation, as vLLM binds them."""

    def __init__(self) -> None:
        self.buffer = torch.zeros(BLOCKS * 2 * PAGE, dtype=torch.int8)
        rows = self.buffer.view(BLOCKS, 2 * PAGE)
        dense = rows[:, :PAGE].view(torch.float32).view(BLOCKS, 2, 16, 32)
        pages = rows[:, PAGE:]
        self.caches = {"dense": dense, "state": pages.view(BLOCKS, 1, 1, PAGE)}
        states = (pages[:, : PAGE // 2].view(torch.float32), pages[:, PAGE // 2 :].view(torch.bfloat16))
        self.layers: dict[str, Any] = {
            "dense": torch.nn.Module(),
            "state": SimpleNamespace(kv_cache=states),
            "not moved": SimpleNamespace(),
        }
        self.layers["dense"].kv_cache = dense
        self.config = SimpleNamespace(compilation_config=SimpleNamespace(static_forward_context=self.layers))

    def geometry(self, address: int | None = None) -> RankGeometry:
        start = self.buffer.data_ptr() if address is None else address
        page, snapshot = opaque_page("a", 16, PAGE, 0, 1), opaque_page("b", 0, PAGE, 0, 1)
        groups = (
            Group(GroupKind.FULL, 16, 0, (Layer("dense", start, 2 * PAGE, page),)),
            Group(GroupKind.STATE, 16, 0, (Layer("state", start + PAGE, 2 * PAGE, snapshot),)),
        )
        return RankGeometry(0, 1, 0, 1, BLOCKS, groups, (Region(start, self.buffer.nbytes),))

    def guard(self) -> CacheGuard:
        return CacheGuard(self.config, self.geometry(), self.caches, self.caches)


@pytest.fixture
def bound() -> BoundLayers:
    return BoundLayers()


def moves_of(guard: CacheGuard) -> tuple[str, str]:
    return guard.find_move(thorough=False), guard.find_move(thorough=True)


def test_an_unchanged_cache_has_not_moved(bound: BoundLayers) -> None:
    guard = bound.guard()
    assert moves_of(guard) == ("", "")
    assert guard.find_other(bound.caches) == ""


def test_new_views_of_the_same_memory_have_not_moved(bound: BoundLayers) -> None:
    guard = bound.guard()
    bound.layers["dense"].kv_cache = bound.caches["dense"].view(BLOCKS, 2, 16, 32)
    bound.layers["state"].kv_cache = tuple(state[:] for state in bound.layers["state"].kv_cache)
    assert moves_of(guard) == ("", "")
    assert guard._bound.are_bound(), "it compares with the new objects from now on"
    assert guard.find_other({name: cache[:] for name, cache in bound.caches.items()}) == ""


def replaced(bound: BoundLayers) -> None:
    bound.layers["dense"].kv_cache = bound.caches["dense"].clone()


def restrided(bound: BoundLayers) -> None:
    """The same bytes, with tokens outside of heads."""
    dense = bound.caches["dense"]
    bound.layers["dense"].kv_cache = dense.view(BLOCKS, 16, 2, 32).transpose(1, 2)


def shifted(bound: BoundLayers) -> None:
    bound.layers["dense"].kv_cache = bound.caches["dense"][1:]


def emptied(bound: BoundLayers) -> None:
    """As vLLM does when it clears the caches of layers."""
    bound.layers["dense"].kv_cache = torch.tensor([])


def gone(bound: BoundLayers) -> None:
    del bound.layers["dense"].kv_cache


def one_state(bound: BoundLayers) -> None:
    first, second = bound.layers["state"].kv_cache
    bound.layers["state"].kv_cache = (first, second.clone())


def no_state(bound: BoundLayers) -> None:
    bound.layers["state"].kv_cache = []


CHANGES = (replaced, restrided, shifted, emptied, gone, one_state, no_state)


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_another_tensor_of_a_layer_is_found_in_every_step(
    bound: BoundLayers, change: Callable[[BoundLayers], None]
) -> None:
    guard = bound.guard()
    change(bound)
    for found in moves_of(guard):
        assert found.startswith("layer state: " if "state" in change.__name__ else "layer dense: ")
        assert "computes in" in found
        assert "; expected 8 blocks from 0x" in found


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_an_engine_that_computes_in_other_memory_does_not_start(
    bound: BoundLayers, change: Callable[[BoundLayers], None]
) -> None:
    change(bound)
    with pytest.raises(ConfigError, match=r"^layer .*; expected .*run it without kvferry, and report this"):
        bound.guard()


def test_a_tensor_that_changes_in_place_is_found_by_the_thorough_look(bound: BoundLayers) -> None:
    guard = bound.guard()
    dense = bound.layers["dense"].kv_cache
    dense.as_strided_(dense.shape, [stride // 2 for stride in dense.stride()])
    assert guard.find_move(thorough=True).startswith("layer dense: the layer computes in 8 blocks")
    other = BoundLayers()
    guard = other.guard()
    other.layers["dense"].kv_cache.set_(torch.zeros(BLOCKS, 2, 16, 32))
    assert guard.find_move(thorough=True).startswith("layer dense: the layer computes in 8 blocks")


def test_memory_is_not_registered_if_it_is_not_the_tensors(bound: BoundLayers) -> None:
    elsewhere = bound.geometry(bound.buffer.data_ptr() + 4096)
    with pytest.raises(
        ConfigError, match=r"^layer dense: 8 pages from 0x.* are registered; expected 8 blocks"
    ):
        CacheGuard(bound.config, elsewhere, bound.caches, bound.caches)
    shorter = replace(bound.geometry(), regions=(Region(bound.buffer.data_ptr(), bound.buffer.nbytes - 1),))
    with pytest.raises(ConfigError, match=r"^layer dense: 8 pages"):
        CacheGuard(bound.config, shorter, bound.caches, bound.caches)


def test_a_host_buffer_is_registered_and_the_engines_tensors_are_watched(bound: BoundLayers) -> None:
    buffer = BoundLayers()
    guard = CacheGuard(bound.config, buffer.geometry(), buffer.caches, bound.caches)
    assert moves_of(guard) == ("", "")
    replaced(bound)
    assert all(moves_of(guard))
    with pytest.raises(ConfigError, match="pages from"):
        CacheGuard(bound.config, bound.geometry(), buffer.caches, bound.caches)


def test_caches_that_are_registered_again_are_compared(bound: BoundLayers) -> None:
    guard = bound.guard()
    other = BoundLayers()
    assert guard.find_other(other.caches).startswith("layer dense: vLLM handed over 8 blocks from 0x")
    alone = {"state": bound.caches["state"]}
    assert guard.find_other(alone).startswith(
        "layer dense: vLLM handed over no cache for it; expected 8 blocks"
    )
    replaced(bound)
    assert guard.find_other(bound.caches).startswith("layer dense: the layer computes in")


class Half:
    """A worker half that remembers what it is told."""

    def __init__(self) -> None:
        self.told: list[Any] = []

    def on_cache_moved(self) -> None:
        self.told.append("moved")

    def begin(self, orders: Any) -> None:
        self.told.append(orders)

    def on_weights_changed(self) -> None: ...

    def fall_asleep(self) -> None: ...


@pytest.fixture
def worker(bound: BoundLayers, monkeypatch: pytest.MonkeyPatch) -> VLLMWorker:
    for name in ("built_of", "hook_weight_changes", "hook_sleep"):
        monkeypatch.setattr(worker_module, name, lambda *_, **__: None)
    monkeypatch.setattr(worker_module, "WorkerHalf", Half)
    config = SimpleNamespace(**vars(bound.config), kv_transfer_config=SimpleNamespace(engine_id="one"))
    made = VLLMWorker(config, bound.caches)
    made._guard = bound.guard()
    return made


def step(quiet: bool) -> Any:
    return SimpleNamespace(orders=SimpleNamespace(quiet=quiet))


@pytest.mark.parametrize("quiet", [True, False])
def test_a_worker_stops_before_the_step_and_logs_once(
    bound: BoundLayers, worker: VLLMWorker, caplog: pytest.LogCaptureFixture, quiet: bool
) -> None:
    first, second, third = (step(quiet) for _ in range(3))
    worker.begin(first)
    replaced(bound)
    worker.begin(second)
    worker.begin(third)
    assert worker.half.told == [first.orders, "moved", second.orders, third.orders]
    (line,) = caplog.records
    assert line.levelno == logging.ERROR
    assert line.getMessage().startswith(f"{MOVED}: layer dense: the layer computes in 8 blocks from ")
    assert line.getMessage().endswith("uses no peers and no tiers: start it anew")


def test_a_worker_looks_for_changes_in_place_only_in_steps_that_move_something(
    bound: BoundLayers, worker: VLLMWorker
) -> None:
    dense = bound.layers["dense"].kv_cache
    dense.as_strided_(dense.shape, [stride // 2 for stride in dense.stride()])
    worker.begin(step(quiet=True))
    assert "moved" not in worker.half.told
    worker.begin(step(quiet=False))
    assert "moved" in worker.half.told


def test_a_worker_stops_when_other_caches_are_registered(bound: BoundLayers, worker: VLLMWorker) -> None:
    worker.register_again(dict(bound.caches))
    assert worker.half.told == []
    worker.register_again(BoundLayers().caches)
    assert worker.half.told == ["moved"]
