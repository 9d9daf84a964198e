"""Identity of a model's weights: a digest of the checkpoint, or a description if there is no digest."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from kvferry.cache.weights import weights_of

logger = logging.getLogger(__name__)

_UNVERIFIED, _DUMMY = _DESCRIPTIONS = ("unverified", "dummy")
"""First words of a description of weights without a digest."""


def weights(vllm_config: Any, model: Any, load_config: Any) -> str:
    """Return a text that identifies weights: a digest, or a description (`is_unverified`)."""
    load_format = str(load_config.load_format)
    name = str(model.model_weights or model.model)
    # Such a file is not the checkpoint whose name is given.
    if load_format == "tensorizer":
        return f"{_UNVERIFIED} {load_format} of {name}"
    # Dummy weights depend on the number of ranks.
    if load_format == "dummy":
        return f"{_DUMMY}, seed {model.seed}, {vllm_config.parallel_config.tensor_parallel_size} ranks"
    checkpoint = _checkpoint(name, model.revision)
    digest = weights_of(checkpoint) if checkpoint else None
    if digest is None:
        logger.warning(
            "the checkpoint of %s is not on this machine's disk: its weights cannot be verified, "
            "peers are compared by its name and revision", name,
        )  # fmt: skip
        return f"{_UNVERIFIED} {name} at {model.revision or 'any revision'}"
    return digest


def is_unverified(found: str) -> bool:
    """Return True if a text of `weights` is only a description.

    Two engines with the same description may have different weights.
    """
    return found.startswith(_DESCRIPTIONS)


def _checkpoint(name: str, revision: str | None) -> Path | None:
    """Return the folder of a model's checkpoint on this machine's disk; None if it is not there."""
    if Path(name).exists():
        return Path(name)
    try:
        from huggingface_hub import snapshot_download  # noqa: PLC0415 - only for names that are not folders

        # An engine has downloaded it by now, so nothing is downloaded here.
        return Path(snapshot_download(name, revision=revision, local_files_only=True))
    except Exception:  # noqa: BLE001 - whatever the reason, there is no checkpoint to read
        return None
