"""Requests as they enter vLLM's scheduler, with fields that clients control."""

from __future__ import annotations

import copy
import uuid
from functools import wraps
from typing import Any

from vllm.v1.core.sched.scheduler import Scheduler

_GUARDED = "_kvferry_guarded"
_FOR_CONNECTORS = ("kv_transfer_params", "ec_transfer_params")


def guard_arrivals() -> None:
    """Patch vLLM's `Scheduler`, once, against requests that would end the engine.

    - A request that the API server has refused gets an id of its own. vLLM takes it from the client's body,
      without the random digits that all other ids end with. With the id of a request whose blocks are kept,
      or that is running, the engine would end with an assertion in `Scheduler.add_request`.
    - Parameters for connectors are not sent to workers, which have no use for them. vLLM pickles them for
      every worker. Objects nested 600 levels deep would end the engine, and large ones hold up a step.
    """
    add = Scheduler.add_request
    if getattr(add, _GUARDED, False):
        return

    @wraps(add)
    def add_request(self: Any, request: Any) -> None:
        if request.abort_immediately:
            request.request_id = f"rejected-{uuid.uuid4().hex}"
        _keep_from_workers(request)
        add(self, request)

    setattr(add_request, _GUARDED, True)
    Scheduler.add_request = add_request


def _keep_from_workers(request: Any) -> None:
    """Take parameters for connectors out of a request's sampling parameters; the request keeps them."""
    extra = getattr(request.sampling_params, "extra_args", None)
    if extra and not extra.keys().isdisjoint(_FOR_CONNECTORS):
        # A copy: requests made of one list of prompts share their parameters.
        request.sampling_params = copy.copy(request.sampling_params)
        kept = {name: value for name, value in extra.items() if name not in _FOR_CONNECTORS}
        request.sampling_params.extra_args = kept or None
