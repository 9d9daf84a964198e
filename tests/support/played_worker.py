"""A vLLM worker with given models."""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.worker.worker_base import WorkerBase


class PlayedWorker(WorkerBase):
    """A worker that has only a compilation configuration and models."""

    def __init__(self, config: Any, target: torch.nn.Module, draft: torch.nn.Module | None = None) -> None:
        # Not vLLM's: that asks a whole configuration for its devices.
        self.compilation_config = config.compilation_config
        self._target, self._draft = target, draft

    def get_model(self) -> torch.nn.Module:
        return self._target

    def get_draft_model(self) -> torch.nn.Module | None:
        return self._draft
