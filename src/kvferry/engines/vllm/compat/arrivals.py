"""Protection of vLLM's scheduler against fields that clients control."""

from __future__ import annotations

import copy
import uuid
from functools import wraps
from typing import Any

from vllm.v1.core.sched.scheduler import Scheduler

_GUARDED = "_kvferry_guarded"
_FOR_CONNECTORS = ("kv_transfer_params", "ec_transfer_params")


def guard_arrivals() -> None:
    """Patch vLLM's `Scheduler` so that two kinds of requests can no longer harm the engine.

    - A request that the API server has refused gets a new id. vLLM takes the id of such a request from the
      client's body, without the random digits that end all other ids. If this id equals the id of a running
      request, or of a request whose blocks are kept, an assertion in `Scheduler.add_request` terminates the
      engine.
    - A request's parameters for connectors are not sent to workers, which do not use them. vLLM pickles these
      parameters for every worker. Parameters nested 600 levels deep would terminate the engine, and large
      parameters would delay a step.
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
    """Remove the parameters for connectors from a request's sampling parameters; mutates `request`.

    vLLM sends the sampling parameters to workers, which do not need the parameters for connectors. The
    request keeps its own `kv_transfer_params` for the scheduler.
    """
    extra = getattr(request.sampling_params, "extra_args", None)
    if extra and not extra.keys().isdisjoint(_FOR_CONNECTORS):
        # Copy first: requests made from one list of prompts share their sampling parameters.
        request.sampling_params = copy.copy(request.sampling_params)
        kept = {name: value for name, value in extra.items() if name not in _FOR_CONNECTORS}
        request.sampling_params.extra_args = kept or None
