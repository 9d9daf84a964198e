"""A hook into the loading of LoRA adapters, because vLLM does not tell connectors about it."""

from __future__ import annotations

from functools import wraps
from typing import Protocol
from weakref import WeakSet

from vllm.lora.request import LoRARequest
from vllm.v1.executor import Executor


class _Listener(Protocol):
    """Object whose method `on_load` is called before each load of a LoRA adapter."""

    def on_load(self, lora: LoRARequest) -> None:
        """Handle the load of a LoRA adapter. The engine loads the adapter just after this call."""


_LISTENERS = WeakSet[_Listener]()


def hook_adapter_loads(listener: _Listener) -> None:
    """Make vLLM call a listener before each load of a LoRA adapter through the engine's API.

    Call this in the scheduler's process. The first call patches vLLM's `Executor`. Only a weak reference to
    the listener is kept.

    If a process has several engines, the listeners of all engines are called for each load. An adapter of
    another engine may then count as reloaded although it is not, and kvferry stops storing its KV.
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
