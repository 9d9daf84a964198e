"""Hooks into calls that change a worker's weights at run time, because vLLM does not tell connectors."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from vllm.config import VllmConfig

from kvferry.engines.vllm.compat.models import worker_of

_OF_WORKER = (
    "reload_weights", "reset_weights", "start_weight_update", "start_draft_weight_update", "update_weights",
    "finish_weight_update",
)  # fmt: skip
_OF_RUNNER = ("reload_weights",)
_OF_MODEL = ("load_weights",)
"""Methods of the worker, the model runner and the models. All of vLLM's ways to change weights end in one of
these, and trainers call them in a worker."""


def hook_weight_changes(vllm_config: VllmConfig, changed: Callable[[], None]) -> None:
    """Make a worker call `changed` each time before it changes the model's weights; mutates the worker.

    The call is made in the thread that runs the worker's steps. Code that writes to the model's parameters
    directly is not detected.

    Raises:
        ConfigError: the worker is not in this process.
    """
    worker = worker_of(vllm_config)
    models = [model for model in (worker.get_model(), worker.get_draft_model()) if model is not None]
    places = [(worker, _OF_WORKER), (worker.model_runner, _OF_RUNNER), *((one, _OF_MODEL) for one in models)]
    for place, names in places:
        for name in names:
            # Not every release, and not every model, has all of them.
            if (inner := getattr(place, name, None)) is not None:
                setattr(place, name, _calling_first(inner, changed))


def _calling_first(inner: Callable[..., Any], changed: Callable[[], None]) -> Callable[..., Any]:
    @wraps(inner)
    def call(*arguments: Any, **named: Any) -> Any:
        changed()
        return inner(*arguments, **named)

    return call
