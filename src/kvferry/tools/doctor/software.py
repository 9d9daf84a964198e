"""Check the installed software: kvferry, vLLM and the connector."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Mapping
from pathlib import Path

import kvferry
from kvferry.cache import cached_digests
from kvferry.common.units import counted
from kvferry.engines.vllm import is_supported, supported_text, vllm_version
from kvferry.memory import KERNEL, WHY_NO_KERNEL
from kvferry.tools import extras
from kvferry.tools.doctor.finding import Finding, ProcessResult, bad, note, ok, run_python
from kvferry.tools.doctor.probes import MODULE, parse_output
from kvferry.tools.serving.machine_checks import REMEDY

_SECONDS = 120.0

Probe = Callable[[], ProcessResult]


def vllm(version: str | None) -> Finding:
    """Check whether vLLM is installed, and in a version that kvferry works with."""
    if version is None:
        absent = "is not installed here: no engine can be started on this machine"
        return note("vLLM", absent, extras.VLLM.advice)
    if not is_supported(version):
        supported = supported_text()
        return bad("vLLM", f"{version}; kvferry works with {supported}", f"install vLLM {supported}")
    return ok("vLLM", f"{version}, which kvferry works with")


def _import_connector() -> ProcessResult:
    return run_python(["-m", MODULE, "connector"], _SECONDS)


def connector(probe: Probe = _import_connector) -> list[Finding]:
    """Check that vLLM loads the connector, and that vLLM's hybrid KV cache manager would be enabled."""
    subject = "connector"
    ended = probe()
    printed = {name: value for line in parse_output(ended.out) for name, value in line.items()}
    if "connector" not in printed:
        what = "vLLM itself cannot be imported" if "version" not in printed else "vLLM cannot load it"
        return [bad(subject, f"{what}: {ended.last_words}", f"repair the installation: {extras.VLLM.advice}")]
    found = [ok(subject, f"vLLM {printed['version']} loads it, for {printed['device']}")]
    if printed["connector"] and printed["platform"]:
        hybrid = ok(
            "hybrid KV cache manager",
            "would be on, so sliding windows and recurrent state are transferred, unless an engine turns "
            "it off",
        )
    else:
        hybrid = bad(
            "hybrid KV cache manager",
            f"would be off: vLLM's platform {printed['device']} has none, so windows are transferred as "
            "full attention",
            "use a platform that has one",
        )
    found.append(hybrid)
    if "attention" in printed:
        found.append(ok("attention", f"over bfloat16 works on this CPU ({printed['attention']})"))
    elif "trying" in printed:
        broken = f"vLLM's, over bfloat16, its default on a CPU, does not work here: {ended.how}"
        found.append(bad("attention", broken, REMEDY))
    return found


def hash_seed(environment: Mapping[str, str] = os.environ) -> Finding:
    """Report how keys of chunks are computed, and that ``PYTHONHASHSEED`` does not affect the keys."""
    # Engines may have different values of this variable.
    seed = environment.get("PYTHONHASHSEED")
    return ok(
        "chunk names",
        "chunks are named by BLAKE2b of their tokens, in a namespace of the weights' content and the model's "
        f"configuration; PYTHONHASHSEED ({'not set' if seed is None else seed}) does not matter",
    )


def weights_cache(path: Path | None, digests: int) -> Finding:
    """Check that digests of weights can be kept for later starts; `path` is None without a home directory."""
    subject, again = "weights", "every engine start reads all weights again, at several GB/s"
    if path is None:
        advice = "set XDG_CACHE_HOME to a folder that is kept"
        return note(subject, f"this user has no home directory: {again}", advice)
    # The first engine creates the file and its folders.
    there = next(one for one in (path, *path.parents) if one.exists())
    if not os.access(there, os.W_OK):
        advice = "correct its owner and mode, or set XDG_CACHE_HOME"
        return note(subject, f"{path} cannot be written: {again}", advice)
    if not digests:
        return ok(subject, f"none were read here yet; digests will be remembered in {path}")
    return ok(subject, f"digests of {counted(digests, 'file')} are remembered in {path}")


def copies(kernel: bool = KERNEL is not None, why: str = WHY_NO_KERNEL) -> Finding:
    """Report whether parts of KV blocks in host memory are copied by the native kernel or by numpy."""
    if kernel:
        return ok("copies", "in host memory are made by the native kernel")
    return note(
        "copies",
        f"in host memory are made by numpy, more slowly than by the native kernel: {why}",
        "install a C compiler (gcc), then install kvferry again",
    )


def check() -> list[Finding]:
    """Check the installed versions of kvferry and vLLM, the connector, and the stored digests of weights."""
    version = vllm_version()
    python = f"{kvferry.__version__} on Python {platform.python_version()}"
    found = [ok("kvferry", python), vllm(version)]
    if version is not None:
        found += connector()
    return [*found, copies(), hash_seed(), weights_cache(*cached_digests())]
