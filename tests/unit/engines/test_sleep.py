"""Calls of vLLM with which an engine gives up the memory of its KV cache and gets it back."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from kvferry.engines.vllm.compat import process as memory, process as sleep


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What happens to a worker and around it, in order."""
    told: list[Any] = []
    worker = SimpleNamespace(
        sleep=lambda level: told.append(("sleep", level)),
        discard=lambda tags: told.append(("discard", tags)),
        wake_up=lambda tags: told.append(("wake up", tags)),
    )
    monkeypatch.setattr(memory, "worker_of", lambda _: worker)
    memory.hook_sleep(
        None,
        release=lambda: told.append("release"),
        restore=lambda: told.append("restore"),
        lose_weights=lambda: told.append("lose weights"),
    )
    told.append(worker)
    return told


KV, WEIGHTS = ("kv_cache",), ("weights",)


@pytest.mark.parametrize(
    ("call", "done"),
    [
        (lambda one: one.sleep(level=1), ["release", ("sleep", 1)]),
        (lambda one: one.sleep(), ["release", ("sleep", 1)]),
        (lambda one: one.sleep(2), ["release", "lose weights", ("sleep", 2)]),
        (lambda one: one.discard(KV), ["release", ("discard", KV)]),
        (lambda one: one.discard(WEIGHTS), ["lose weights", ("discard", WEIGHTS)]),
        (lambda one: one.wake_up(), [("wake up", None), "restore"]),
        (lambda one: one.wake_up(["kv_cache"]), [("wake up", ["kv_cache"]), "restore"]),
        (lambda one: one.wake_up(["weights"]), [("wake up", ["weights"])]),
    ],
)
def test_a_worker_releases_before_memory_goes_and_restores_when_it_is_back(
    told: list[Any], call: Callable[[Any], None], done: list[Any]
) -> None:
    call(told.pop())
    assert told == done


def test_a_worker_whose_memory_is_in_use_keeps_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise RuntimeError

    worker = SimpleNamespace(sleep=pytest.fail, discard=pytest.fail, wake_up=pytest.fail)
    monkeypatch.setattr(memory, "worker_of", lambda _: worker)
    memory.hook_sleep(None, release=refuse, restore=pytest.fail, lose_weights=pytest.fail)
    with pytest.raises(RuntimeError):
        worker.sleep(level=2)


class Core:
    """An engine's core that sleeps when its `pause` is over."""

    def __init__(self, pause: Any) -> None:
        self.told: list[Any] = []
        self.pause = pause
        connector = SimpleNamespace(
            on_sleep=lambda: self.told.append("on_sleep"),
            on_asleep=lambda failed: self.told.append(("on_asleep", failed)),
            set_xfer_handshake_metadata_pp_aware=self.told.append,
        )
        self.scheduler = SimpleNamespace(get_kv_connector=lambda: connector)
        cards = [{(0, 0): "a card"}, None, {(0, 1): "another"}]
        self.model_executor = SimpleNamespace(get_kv_connector_handshake_metadata=lambda: cards)

    def sleep(self, level: int = 1, mode: str = "abort") -> Any:
        self.told.append((level, mode))
        if isinstance(self.pause, Exception):
            raise self.pause
        return self.pause

    def release_kv_cache_memory(self) -> None:
        self.sleep(0)

    def wake_up(self, tags: list[str] | None = None) -> bool:
        self.told.append(tags)
        return True


@pytest.fixture
def hooked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sleep, "EngineCore", type("Hooked", (Core,), dict(vars(Core))))
    sleep.tell_of_sleep()


def core(pause: Any = None) -> Any:
    return sleep.EngineCore(pause)  # type: ignore[arg-type]


@pytest.mark.usefixtures("hooked")
def test_the_connector_learns_of_sleep_before_the_caches_are_reset_and_when_it_is_over() -> None:
    one = core()
    one.sleep(2, mode="wait")
    assert one.told == ["on_sleep", (2, "wait"), ("on_asleep", False)]
    one = core()
    one.release_kv_cache_memory()
    assert one.told == ["on_sleep", (0, "abort"), ("on_asleep", False)]
    one = core()
    one.sleep(0)
    assert one.told == [(0, "abort")], "level 0 only pauses"


@pytest.mark.usefixtures("hooked")
def test_the_connector_learns_of_sleep_that_fails_or_comes_later() -> None:
    one = core(RuntimeError())
    with pytest.raises(RuntimeError):
        one.sleep()
    assert one.told[-1] == ("on_asleep", True)
    for error in (None, RuntimeError()):
        one = core(pause := Future[None]())
        assert one.sleep() is pause
        assert one.told == ["on_sleep", (1, "abort")]
        pause.set_exception(error) if error else pause.set_result(None)
        assert one.told[-1] == ("on_asleep", error is not None)


@pytest.mark.usefixtures("hooked")
def test_the_connector_gets_the_cards_of_workers_whose_kv_cache_has_memory_again() -> None:
    one = core()
    assert one.wake_up(["weights"])
    assert one.told == [["weights"]]
    assert one.wake_up()
    assert one.told[1:] == [None, {(0, 0): "a card", (0, 1): "another"}]
