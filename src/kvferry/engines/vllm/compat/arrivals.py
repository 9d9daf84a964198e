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
    """Patch vLLM's `Scheduler` so that clients cannot terminate or delay the engine with certain requests.

    - Duplicate ids: if the API server refuses a request, vLLM uses the id in the client's body unchanged. It
      appends random digits to all other ids. If the unchanged id equals that of a running request, or of an
      ended one whose blocks are kept, an assertion terminates the engine. So the patch gives each refused
      request a new id.
    - Large parameters: vLLM pickles a request's parameters for connectors and sends them to every worker,
      although workers do not use them. Large parameters delay a step, and parameters nested 600 levels deep
      terminate the engine. So the patch removes them from the data that is sent to workers.
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

    vLLM sends the sampling parameters to workers, but only the scheduler needs the parameters for connectors.
    It reads them from the request's attribute `kv_transfer_params`, which stays as it is.
    """
    extra = getattr(request.sampling_params, "extra_args", None)
    if extra and not extra.keys().isdisjoint(_FOR_CONNECTORS):
        # Copy first: requests made from one list of prompts share their sampling parameters.
        request.sampling_params = copy.copy(request.sampling_params)
        kept = {name: value for name, value in extra.items() if name not in _FOR_CONNECTORS}
        request.sampling_params.extra_args = kept or None
