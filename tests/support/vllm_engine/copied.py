"""Engines' processes as copies of one that has imported everything, which is most of the work of a start."""

from __future__ import annotations

import gc
import mmap
import os
import secrets
from multiprocessing import resource_tracker
from typing import Any

_room: list[mmap.mmap] = []


def settle() -> None:
    """In a copy: let its memory lie elsewhere than that of other copies, behind room that nobody uses.

    It would lie at the same addresses: one engine's could then be taken for another one's, and nobody see it.
    """
    size = (1 << 27) + secrets.randbelow(1 << 31) * mmap.PAGESIZE
    _room.append(mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, prot=0))
    gc.freeze()  # what the copies share is not looked through


def inspect_models_here() -> None:
    """Keep vLLM from starting an interpreter to look at a model's class, which imports everything anew.

    It does so for each class that it has not seen on this machine, in each engine.
    """
    from vllm.model_executor.models import registry

    registry._run_in_subprocess = lambda found: found()


def declare() -> None:
    """Let vLLM start processes of a server, and ranks, as copies; on CPUs it has each import everything anew.

    Call this in a process before an engine is made in it: nothing of the engine runs where vLLM starts them.
    """
    from vllm.platforms.cpu import CpuPlatform

    inspect_models_here()
    update = CpuPlatform.check_and_update_config

    def updated(cls: Any, config: Any) -> None:
        update(config)
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"

    CpuPlatform.check_and_update_config = classmethod(updated)
    resource_tracker.ensure_running()  # one for all copies: what is left of killed ones is removed by it
    os.register_at_fork(after_in_child=settle)
