"""Check before engines start that vLLM finds the model, and that its attention works on this CPU."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from kvferry.common.errors import ConfigError
from kvferry.common.files import expanded, replace_file, user_cache
from kvferry.engines.vllm import vllm_version
from kvferry.tools.plan.find import CONFIG_FILE, PARAMS_FILE, NotOnHub, hub_config
from kvferry.tools.serving.devices import vllm_is_for_cpu

# vLLM needs one of them: Hugging Face's or Mistral's.
_CONFIGS = (CONFIG_FILE, PARAMS_FILE)
_MODEL_REMEDY = "give a folder with a checkpoint, or the id of a model, such as Qwen/Qwen3-0.6B"

REMEDY = "add --dtype float32 to the engine's arguments"
_PROBE = (sys.executable, "-m", "kvferry.engines.vllm.compat.cpu_attention")
_PROBE_SECONDS = 120.0
_PROCESSOR = Path("/proc/cpuinfo")
# Flag of processors on which the attention may fail. Others need no trial, which takes seconds.
_DOUBTFUL = "amx_tile"


def check_model(model: str) -> None:
    """Check that a model is a folder with a checkpoint, or a name on the Hugging Face hub or in its cache.

    Raises:
        ConfigError: vLLM would not find the model.
    """
    # Models of other places, such as ``s3://`` or ModelScope, are not checked.
    if "://" in model or os.environ.get("VLLM_USE_MODELSCOPE", "").lower() in ("1", "true"):
        return
    check_path(model)
    path = expanded(model)
    if path.is_dir():
        if not any((path / name).is_file() for name in _CONFIGS):
            raise ConfigError(f"the folder {model} holds no {' or '.join(_CONFIGS)}; {_MODEL_REMEDY}")
    elif not path.is_file():
        try:
            hub_config(model.partition(":")[0])  # a colon precedes the quantisation of a GGUF file
        except NotOnHub as error:
            raise ConfigError(f"there is no folder {model!r} here, and {error}; {_MODEL_REMEDY}") from error
        except ConfigError:
            pass  # a model without config.json, such as one of Mistral's


def check_path(model: str) -> None:
    """Check that a model given as a path exists and can be read. Raise ConfigError if not."""
    if model.startswith(("/", "./", "../", "~")):
        try:
            expanded(model).stat()
        except FileNotFoundError as error:
            raise ConfigError(
                f"there is no model at {model}; give a folder that exists, or the id of a model"
            ) from error
        except OSError as error:
            raise ConfigError(
                f"the model at {model} cannot be read: {error.strerror}; give a folder that user "
                f"{os.geteuid()} may read, or the id of a model"
            ) from error


def value_of(arguments: Sequence[str], *names: str) -> str | None:
    """Return the value of an option of vLLM's API server; None if it is not given.

    >>> value_of(["--dtype=float32", "-pp", "2"], "--pipeline-parallel-size", "-pp")
    '2'
    """
    found = None
    # Of several values, the last one counts, and vLLM reads --some_flag as --some-flag.
    for index, argument in enumerate(arguments):
        flag, equals, value = argument.partition("=")
        if flag.replace("_", "-") in names:
            found = value if equals else "".join(arguments[index + 1 : index + 2])
    return found


def signal_text(number: int) -> str:
    """Return a signal as text, such as ``signal 4 (SIGILL)``."""
    with suppress(ValueError):
        return f"signal {number} ({signal.Signals(number).name})"
    return f"signal {number}"


def check_attention(arguments: Sequence[str]) -> None:
    """Check that an engine that computes in bfloat16 works on this machine's CPU.

    Raises:
        ConfigError: the arguments choose no other dtype, and vLLM's attention over bfloat16 fails here.
    """
    dtype = value_of(arguments, "--dtype")
    if dtype in (None, "auto", "bfloat16") and (fault := bfloat16_fault()):
        raise ConfigError(f"{fault}; {REMEDY}")


def _compute() -> int:
    nothing = subprocess.DEVNULL
    try:
        return subprocess.run(
            _PROBE, stdin=nothing, stdout=nothing, stderr=nothing, timeout=_PROBE_SECONDS, check=False
        ).returncode
    except subprocess.TimeoutExpired:
        return 0  # an engine says more about what hangs


def bfloat16_fault(run: Callable[[], int] = _compute, processor: Path = _PROCESSOR) -> str:
    """Return a sentence about how vLLM's attention over bfloat16 fails on this CPU; empty if it does not.

    The result of a trial is remembered in the user's cache directory, for this processor, kernel and vLLM.

    Args:
        run: function that computes attention in another process, and returns its exit code, or -n for signal
            n.
        processor: file in which the kernel describes the processor.
    """
    version = vllm_version()
    with suppress(OSError):
        lines = processor.read_text().splitlines()
        about = {line for line in lines if line.startswith(("model name", "flags", "microcode"))}
        if version is None or not vllm_is_for_cpu() or _DOUBTFUL not in " ".join(about).split():
            return ""
        key = hashlib.sha256("\n".join([version, platform.release(), *sorted(about)]).encode()).hexdigest()
        code = _remembered(key, run)
        if code < 0:
            return f"vLLM's attention over bfloat16 ends an engine on this CPU with {signal_text(-code)}"
    return ""


def _remembered(key: str, run: Callable[[], int]) -> int:
    """Return the exit code of an earlier trial, or run and remember a new one."""
    # Without a cache, or with a file of another form, each start tries anew.
    with suppress(ConfigError, OSError, ValueError, LookupError, TypeError):
        kept = json.loads((user_cache() / "cpu_attention.json").read_text())
        if kept["key"] == key:
            return int(kept["code"])
    code = run()
    with suppress(ConfigError, OSError):
        path = user_cache() / "cpu_attention.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, json.dumps({"key": key, "code": code}) + os.linesep)
    return code
