"""Check which NIXL plugins start, and whether a process that used NIXL ends cleanly."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from kvferry.tools.doctor.finding import Finding, ProcessResult, bad, note, ok, run_python
from kvferry.tools.doctor.probes import MODULE, parse_output

_SECONDS = 60.0
_INSTALL = "pip install 'nixl>=1.5,<2'"


def _start_plugins() -> ProcessResult:
    return run_python(["-m", MODULE, "nixl"], _SECONDS, {"NIXL_LOG_LEVEL": "ERROR"})


def check(version: str | None, probe: Callable[[], ProcessResult] = _start_plugins) -> Iterator[Finding]:
    """Check that NIXL is installed, that its plugins start, and that a process can exit after using it."""
    if version is None:
        absent = "is not installed here: engines on this machine can keep KV in tiers, but not exchange it"
        yield note("NIXL", absent, _INSTALL)
        return
    ended = probe()
    lines = parse_output(ended.out)
    tried = {line["plugin"]: line["why"] for line in lines if "plugin" in line}
    start = [plugin for plugin, why in tried.items() if not why]
    if "UCX" not in start:
        why = tried.get("UCX") or ended.last_words
        advice = f"check UCX_TLS, or reinstall NIXL: {_INSTALL}"
        yield bad("NIXL", f"{version}, whose plugin UCX does not start: {why}", advice)
        return
    yield ok("NIXL", f"{version}; plugins that start: {', '.join(start)}")
    if rest := ", ".join(plugin for plugin, why in tried.items() if why):
        yield ok("NIXL plugins", f"kvferry does not need these, which do not start here: {rest}")
    trying = [line["trying"] for line in lines if "trying" in line]
    # A plugin is announced before it is tried: one without a result has ended the process.
    if len(trying) > len(tried):
        crash = f"{trying[-1]} crashes the process that starts it ({ended.how})"
        yield note("NIXL plugins", f"{crash}; kvferry does not use it")
        return
    # Some RDMA libraries crash at exit, unless the system's libefa is loaded before NIXL's own.
    libefa = any(line.get("verbs") for line in lines)
    beside = "the system's libefa is loaded first" if libefa else "no libefa here"
    if ended.code:
        yield bad(
            "RDMA libraries",
            f"a process that used NIXL crashes when it exits ({ended.how}); {beside}",
            "reinstall the system's rdma-core, or remove it where there is no RDMA device",
        )
    else:
        yield ok("RDMA libraries", f"a process that used NIXL exits normally; {beside}")
