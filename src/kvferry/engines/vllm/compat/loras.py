"""A hook into the loading of LoRA adapters, because vLLM does not tell connectors about it."""

from __future__ import annotations

from functools import wraps
from weakref import WeakSet

from vllm.lora.request import LoRARequest
from vllm.v1.executor import Executor

from kvferry.connector.adapters import Adapters

_LISTENERS = WeakSet[Adapters]()


def hook_adapter_loads(listener: Adapters) -> None:
    """Make vLLM call `listener.on_load` before each load of a LoRA adapter through the engine's API.

    Call this in the scheduler's process. Only a weak reference to the listener is kept.
    """
    _LISTENERS.add(listener)
    # The first call patches vLLM for all engines of the process.
    if hasattr(Executor.add_lora, "__wrapped__"):
        return
    inner = Executor.add_lora

    @wraps(inner)
    def add_lora(self: Executor, lora_request: LoRARequest) -> bool:
        # The call does not tell the engine. So if one engine replaces an adapter in place, all engines of the
        # process stop storing KV of their adapters with this id.
        for each in list(_LISTENERS):
            each.on_load(lora_request)
        return bool(inner(self, lora_request))

    Executor.add_lora = add_lora
