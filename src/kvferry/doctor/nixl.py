"""Check which NIXL plugins start, and whether a process that used NIXL ends cleanly."""

from __future__ import annotations

from collections.abc import Callable

from kvferry.doctor.finding import Finding, bad, note, ok
from kvferry.doctor.limits import ProcessResult, run_python
from kvferry.doctor.probes import MODULE, parse_output

_SECONDS = 60.0
_INSTALL = "pip install 'nixl>=1.5,<2'"


def _start_plugins() -> ProcessResult:
    return run_python(["-m", MODULE, "nixl"], _SECONDS, {"NIXL_LOG_LEVEL": "ERROR"})


def check(version: str | None, probe: Callable[[], ProcessResult] = _start_plugins) -> list[Finding]:
    """Check that NIXL is installed, that its plugins start, and that a process can exit after using it.

    Args:
        version: installed version of NIXL; None if it is not installed.
        probe: function that starts the plugins one by one in another process, and returns its result.
    """
    if version is None:
        absent = "is not installed here: engines on this machine can keep KV in tiers, but not exchange it"
        return [note("NIXL", absent, _INSTALL)]
    ended = probe()
    lines = parse_output(ended.out)
    tried = {line["plugin"]: line["why"] for line in lines if "plugin" in line}
    start = [plugin for plugin, why in tried.items() if not why]
    if "UCX" not in start:
        why = tried.get("UCX") or ended.last_words
        return [
            bad(
                "NIXL",
                f"{version}, whose plugin UCX does not start: {why}",
                f"check UCX_TLS, or reinstall NIXL: {_INSTALL}",
            )
        ]
    found = [ok("NIXL", f"{version}; plugins that start: {', '.join(start)}")]
    rest = ", ".join(plugin for plugin, why in tried.items() if why)
    if rest:
        found.append(ok("NIXL plugins", f"kvferry does not need these, which do not start here: {rest}"))
    trying = [line["trying"] for line in lines if "trying" in line]
    if len(trying) > len(tried):
        stopped = f"{trying[-1]} crashes the process that starts it ({ended.how}); kvferry does not use it"
        return [*found, note("NIXL plugins", stopped)]
    libraries = any(line.get("verbs") for line in lines)
    return [*found, _check_exit(ended, libraries)]


def _check_exit(ended: ProcessResult, libraries: bool) -> Finding:
    """Check that a process that used NIXL did not crash at its exit. Some RDMA libraries cause such crashes.

    Args:
        ended: result of the process.
        libraries: True if the process loaded the system's libefa before NIXL, to prevent such a crash; False
            if it could not load libefa.
    """
    beside = "the system's libefa is loaded first" if libraries else "no libefa here"
    if ended.code:
        return bad(
            "RDMA libraries",
            f"a process that used NIXL crashes when it exits ({ended.how}); {beside}",
            "reinstall the system's rdma-core, or remove it where there is no RDMA device",
        )
    return ok("RDMA libraries", f"a process that used NIXL exits normally; {beside}")
