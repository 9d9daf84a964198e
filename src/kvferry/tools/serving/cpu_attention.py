"""Find out whether vLLM's attention over bfloat16 works on this machine's CPU, before engines start.

bfloat16 is vLLM's default dtype on a CPU. With AMX in some virtual machines, the first request ends the
engine with SIGILL.
"""

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

from kvferry.engines.vllm.version import vllm_version
from kvferry.errors import ConfigError
from kvferry.tools.serving.arguments import value_of
from kvferry.tools.serving.devices import vllm_is_for_cpu
from kvferry.user_cache import user_cache
from kvferry.whole_file import replace_file

REMEDY = "add --dtype float32 to the engine's arguments"

_PROBE = (sys.executable, "-m", "kvferry.engines.vllm.compat.cpu_attention")
_PROBE_SECONDS = 120.0
_PROCESSOR = Path("/proc/cpuinfo")
# Flag of processors on which the attention may fail. Others need no trial, which takes seconds.
_DOUBTFUL = "amx_tile"
_BFLOAT16 = (None, "auto", "bfloat16")


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
    if value_of(arguments, "--dtype") in _BFLOAT16 and (fault := bfloat16_fault()):
        raise ConfigError(f"{fault}; {REMEDY}")


def bfloat16_fault(run: Callable[[], int] | None = None, processor: Path = _PROCESSOR) -> str:
    """Return a sentence about how vLLM's attention over bfloat16 fails on this CPU; empty if it does not.

    The result of a trial is remembered in the user's cache directory, for this processor, kernel and vLLM.

    Args:
        run: function that computes attention in another process, and returns its exit code, or -n for signal
            n. None for vLLM's own.
        processor: file in which the kernel describes the processor.
    """
    version = vllm_version()
    with suppress(OSError):
        lines = processor.read_text().splitlines()
        about = {line for line in lines if line.startswith(("model name", "flags", "microcode"))}
        if version is None or not vllm_is_for_cpu() or _DOUBTFUL not in " ".join(about).split():
            return ""
        key = hashlib.sha256("\n".join([version, platform.release(), *sorted(about)]).encode()).hexdigest()
        code = _remembered(key, run or _compute)
        if code < 0:
            return f"vLLM's attention over bfloat16 ends an engine on this CPU with {signal_text(-code)}"
    return ""


def _compute() -> int:
    try:
        done = subprocess.run(
            _PROBE,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=_PROBE_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return 0  # an engine says more about what hangs
    return done.returncode


def _remembered(key: str, run: Callable[[], int]) -> int:
    """Return the exit code of an earlier trial, or of a new one, which is then remembered."""
    try:
        path = user_cache() / "cpu_attention.json"
        kept = json.loads(path.read_text())
        if kept["key"] == key:
            return int(kept["code"])
    except (ConfigError, OSError, ValueError, LookupError, TypeError):
        pass  # no cache, or not of this form: only a cache
    code = run()
    with suppress(ConfigError, OSError):
        path = user_cache() / "cpu_attention.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, json.dumps({"key": key, "code": code}) + os.linesep)
    return code
