"""A hook into the loading of LoRA adapters, because vLLM does not tell connectors about it."""

from __future__ import annotations

from functools import wraps
from typing import Protocol
from weakref import WeakSet

from vllm.lora.request import LoRARequest
from vllm.v1.executor import Executor


class _Listener(Protocol):
    """Receiver of a call before each load of an adapter."""

    def on_load(self, lora: LoRARequest) -> None:
        """Handle that the engine is about to load an adapter."""


_LISTENERS = WeakSet[_Listener]()


def hook_adapter_loads(listener: _Listener) -> None:
    """Call a listener, while it is alive, before each load of an adapter through the engine's API.

    Call this in the scheduler's process. It patches vLLM's `Executor` once. If a process has several engines,
    each load reaches the listeners of all of them. Another engine's adapter may then lose its name without
    need, and kvferry no longer keeps its KV.
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
