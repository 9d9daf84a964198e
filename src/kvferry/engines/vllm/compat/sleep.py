"""Hooks into vLLM's sleep and wake-up of an engine, of which vLLM does not tell a scheduler's connector."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from functools import wraps
from typing import Any

from vllm.v1.engine.core import EngineCore

_TELLS = "_kvferry_tells"
_SHARES_CARDS = "_set_kv_connector_handshake_metadata"
"""Method of vLLM 0.33's EngineCore that passes the workers' handshakes to the scheduler's connector."""


def tell_of_sleep() -> None:
    """Patch vLLM's `EngineCore` to tell its connector when the engine sleeps.

    It calls ``on_sleep()`` before the engine gives up the memory of its KV cache, and resets its caches for
    that, and ``on_asleep(failed)`` when it sleeps or has failed to.
    """
    sleep, release, wake_up = EngineCore.sleep, EngineCore.release_kv_cache_memory, EngineCore.wake_up
    if getattr(sleep, _TELLS, False):
        return

    @wraps(sleep)
    def tell_and_sleep(self: Any, level: int = 1, *arguments: Any, **named: Any) -> Any:
        if level < 1:  # it only pauses
            return sleep(self, level, *arguments, **named)
        return _told(self, lambda: sleep(self, level, *arguments, **named))

    @wraps(release)
    def tell_and_release(self: Any) -> None:
        _told(self, lambda: release(self))

    @wraps(wake_up)
    def wake_up_and_share_cards(self: Any, tags: list[str] | None = None) -> bool:
        awake: bool = wake_up(self, tags)
        if tags is None or "kv_cache" in tags:
            _share_cards(self)
        return awake

    setattr(tell_and_sleep, _TELLS, True)
    EngineCore.sleep, EngineCore.release_kv_cache_memory = tell_and_sleep, tell_and_release
    # After a wake-up, vLLM passes the handshakes to the connector again only since 0.33.
    if not hasattr(EngineCore, _SHARES_CARDS):
        EngineCore.wake_up = wake_up_and_share_cards


def _told(core: Any, sleep: Callable[[], Any]) -> Any:
    """Make an engine sleep, and tell its connector before and after. The function may return a future."""
    connector = core.scheduler.get_kv_connector()
    if not hasattr(connector, "on_sleep"):
        return sleep()
    connector.on_sleep()
    try:
        found = sleep()
    except BaseException:
        connector.on_asleep(failed=True)
        raise
    # vLLM first waits until requests have ended.
    if isinstance(found, Future):
        found.add_done_callback(lambda done: connector.on_asleep(failed=done.exception() is not None))
    else:
        connector.on_asleep(failed=False)
    return found


def _share_cards(core: Any) -> None:
    connector = core.scheduler.get_kv_connector()
    if not hasattr(connector, "on_sleep"):  # not one of kvferry's, which may not expect it
        return
    found = core.model_executor.get_kv_connector_handshake_metadata() or ()
    cards = {place: card for of_worker in found if of_worker is not None for place, card in of_worker.items()}
    if cards:
        connector.set_xfer_handshake_metadata_pp_aware(cards)
