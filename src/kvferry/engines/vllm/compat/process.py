"""The engine's process that a connector runs in: logging, cores, device, ranks and address."""

from __future__ import annotations

import logging
import time

from vllm.config import VllmConfig
from vllm.distributed.device_communicators import shm_broadcast
from vllm.distributed.parallel_state import get_pp_group, get_tp_group
from vllm.utils.network_utils import get_ip

# With 20 us and three ranks on two cores, control messages were still delayed in 4 of 10 runs.
_SLEEP_SECONDS = 500e-6


def share_logging() -> None:
    """Send kvferry's log lines to vLLM's handlers, with vLLM's format and level."""
    theirs, ours = logging.getLogger("vllm"), logging.getLogger("kvferry")
    # An application that has set up its own logging keeps it.
    if theirs.handlers and not ours.handlers:
        ours.handlers = list(theirs.handlers)
        ours.setLevel(theirs.level)
        ours.propagate = False


def sleep_between_polls(vllm_config: VllmConfig) -> None:
    """Make an engine on CPUs sleep 0.5 ms between two checks of its message queues; no effect on GPUs."""
    if vllm_config.device_config.device_type == "cpu":
        # vLLM would call `sched_yield` in a loop and keep a core busy as long as the engine runs steps, also
        # while a peer holds a lease or a load is in flight. With two ranks on two cores (Linux 6.18), that
        # delayed control messages by 4 to 60 s.
        shm_broadcast.sched_yield = lambda: time.sleep(_SLEEP_SECONDS)


def tensor_and_pipeline_rank() -> tuple[int, int]:
    """Return the tensor-parallel rank and the pipeline-parallel rank of the worker in this process."""
    return int(get_tp_group().rank_in_group), int(get_pp_group().rank_in_group)


def node_address() -> str:
    """Return the IP address of this machine: ``VLLM_HOST_IP`` if set, else that of the default route."""
    return str(get_ip())
