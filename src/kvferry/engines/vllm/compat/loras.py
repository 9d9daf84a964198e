"""LoRA adapters that an engine's API has it load, which vLLM tells no connector."""

from __future__ import annotations

from functools import wraps
from typing import Protocol
from weakref import WeakSet

from vllm.lora.request import LoRARequest
from vllm.v1.executor import Executor


class _Listener(Protocol):
    """Hears of adapters."""

    def on_load(self, lora: LoRARequest) -> None:
        """Note that the engine is about to load an adapter."""


_LISTENERS = WeakSet[_Listener]()


def tell_of_loads(listener: _Listener) -> None:
    """Call a listener in the scheduler's process before each load that the API asks for, while it is alive.

    Several engines of a process tell all listeners, which cannot do harm: a name is lost at most.
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
