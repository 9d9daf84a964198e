"""A hook into the loading of LoRA adapters by the engine's API; vLLM tells no connector."""

from __future__ import annotations

from functools import wraps
from typing import Protocol
from weakref import WeakSet

from vllm.lora.request import LoRARequest
from vllm.v1.executor import Executor


class _Listener(Protocol):
    """Receiver of a call for each adapter."""

    def on_load(self, lora: LoRARequest) -> None:
        """Note that the engine is about to load an adapter."""


_LISTENERS = WeakSet[_Listener]()


def hook_adapter_loads(listener: _Listener) -> None:
    """Call a listener, while it is alive, before each load that the API asks for.

    Runs in the scheduler's process; changes vLLM's `Executor`, once. If a process has several engines, each
    load reaches the listeners of all engines: an adapter may lose its name, and its KV is not kept then.
    """
    _LISTENERS.add(listener)
    if hasattr(Executor.add_lora, "__wrapped__"):
        return
    inner = Executor.add_lora

    @wraps(inner)
    def add_lora(self: Executor, lora_request: LoRARequest) -> bool:
        for each in list(_LISTENERS):
            each.on_load(lora_request)
        return bool(inner(self, lora_request))

    Executor.add_lora = add_lora
