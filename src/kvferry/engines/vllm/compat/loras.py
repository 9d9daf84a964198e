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
        """Note that the engine is about to load a LoRA adapter. Called just before each load.

        Args:
            lora: the adapter, with its name, id and path.
        """


_LISTENERS = WeakSet[_Listener]()


def hook_adapter_loads(listener: _Listener) -> None:
    """Make vLLM call `listener.on_load` before each load of a LoRA adapter through the engine's API.

    Call this in the scheduler's process. The first call patches vLLM's `Executor`. Only a weak reference to
    the listener is kept.

    If a process has several engines, every load in one engine is reported to the listeners of all engines. If
    one engine replaces an adapter's weights in place, the other engines stop storing KV of their adapters
    with the same id.

    Args:
        listener: object whose method `on_load` is called.
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
