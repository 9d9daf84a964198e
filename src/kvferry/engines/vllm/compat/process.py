"""The engine's process that a connector runs in: its log, cores, device, ranks and address."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import torch
from vllm.config import VllmConfig
from vllm.distributed.device_communicators import shm_broadcast
from vllm.distributed.parallel_state import get_pp_group, get_tp_group
from vllm.utils.network_utils import get_ip

_LOOK_SECONDS = 500e-6


def share_logging() -> None:
    """Send kvferry's log lines to vLLM's handlers, in the same form and from the same level on."""
    theirs, ours = logging.getLogger("vllm"), logging.getLogger("kvferry")
    if theirs.handlers and not ours.handlers:
        ours.handlers = list(theirs.handlers)
        ours.setLevel(theirs.level)
        ours.propagate = False


def leave_cores_to_others(vllm_config: VllmConfig) -> None:
    """Make an engine on CPUs sleep between two looks at its queues, where vLLM spins over ``sched_yield``.

    An engine steps for as long as a lease or a load is open, and with several processes on few cores that
    spinning held up messages of the control channel for 4 to 60 s (two ranks on two cores, Linux 6.18).
    Sleeps of 20 us still did so in 4 of 10 runs with three ranks on two cores.
    """
    if vllm_config.device_config.device_type == "cpu":
        shm_broadcast.sched_yield = lambda: time.sleep(_LOOK_SECONDS)


def after_forward() -> Callable[[], None]:
    """Return a function that waits, in any thread, for the work that the device has been given so far."""
    if not torch.cuda.is_available() or not torch.cuda.is_initialized():
        return lambda: None
    event = torch.cuda.Event()
    event.record()
    wait: Callable[[], None] = event.synchronize
    return wait


def tensor_and_pipeline_rank() -> tuple[int, int]:
    """Return this worker's (tp_rank, pp_rank)."""
    return int(get_tp_group().rank_in_group), int(get_pp_group().rank_in_group)


def node_address() -> str:
    """Return this machine's address among the engine's: ``VLLM_HOST_IP``, or that of the default route."""
    return str(get_ip())
