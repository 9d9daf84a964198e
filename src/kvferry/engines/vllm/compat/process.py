"""The engine's process that a connector runs in: logging, cores, device, ranks and address."""

from __future__ import annotations

import logging
import time

from vllm.config import VllmConfig
from vllm.distributed.device_communicators import shm_broadcast
from vllm.distributed.parallel_state import get_pp_group, get_tp_group
from vllm.utils.network_utils import get_ip

_SLEEP_SECONDS = 500e-6


def share_logging() -> None:
    """Send kvferry's log lines to vLLM's handlers, with vLLM's format and level."""
    theirs, ours = logging.getLogger("vllm"), logging.getLogger("kvferry")
    if theirs.handlers and not ours.handlers:
        ours.handlers = list(theirs.handlers)
        ours.setLevel(theirs.level)
        ours.propagate = False


def sleep_between_polls(vllm_config: VllmConfig) -> None:
    """Make an engine on CPUs sleep 0.5 ms between two checks of its message queues; no effect on GPUs.

    Otherwise vLLM calls ``sched_yield`` in a loop and keeps a core busy as long as the engine runs steps,
    which includes all the time during which a peer holds a lease or a load is in flight. In a test with two
    ranks on two cores (Linux 6.18), the loop delayed kvferry's control messages by 4 to 60 s. With three
    ranks on two cores and sleeps of 20 us, control messages were still delayed in 4 of 10 runs.
    """
    if vllm_config.device_config.device_type == "cpu":
        shm_broadcast.sched_yield = lambda: time.sleep(_SLEEP_SECONDS)


def tensor_and_pipeline_rank() -> tuple[int, int]:
    """Return the tensor-parallel rank and the pipeline-parallel rank of the worker in this process."""
    return int(get_tp_group().rank_in_group), int(get_pp_group().rank_in_group)


def node_address() -> str:
    """Return the IP address that this machine uses in the network of the engine.

    The address is ``VLLM_HOST_IP`` if the variable is set, else the address of the default route.
    """
    return str(get_ip())
