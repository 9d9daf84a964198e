"""Run all checks in order: of this machine, a configuration, engines, and pairs of engines."""

from __future__ import annotations

import platform
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from urllib.parse import urlsplit

from kvferry.common.errors import ConfigError
from kvferry.common.machine import is_linux
from kvferry.connector import ConnectorConfig, read_tiers
from kvferry.engines.vllm import nixl_version
from kvferry.planning import Costs
from kvferry.tools.doctor import (
    costs,
    engine_metrics,
    listening,
    machine,
    nixl,
    pairs,
    reads,
    software,
    storage,
)
from kvferry.tools.doctor.engines import Target, examine_engines
from kvferry.tools.doctor.finding import Finding, ReportSection, note, run_check
from kvferry.tools.doctor.reads import ReadTimings, calibrate
from kvferry.tools.serving.devices import visible_devices
from kvferry.transport import Keys, existing_keys, is_loopback, load_costs

_QUICK_SECONDS = 20.0
_LONG_SECONDS = 240.0
_CALIBRATION_SECONDS = 600.0


@dataclass(frozen=True, slots=True)
class Examination:
    """The things that a run of `kvferry doctor` checks, and the keys that it uses.

    Attributes:
        secret_file: path of the engines' key file; None for that of the configuration, or else of this
            machine.
        calibrate: True to measure the costs of transfers first, and to write them to the costs file.
    """

    targets: tuple[Target, ...] = ()
    config: str | None = None
    secret_file: str | None = None
    machine: bool = True
    calibrate: bool = False


def examine(job: Examination, progress: Callable[[str], None]) -> list[ReportSection]:
    """Run all checks, and return the sections of the report.

    Raises:
        ConfigError: there is nothing to check, the key file has no valid secret, or the configuration file
            is not a JSON object. Also raised if one of these files cannot be read.
    """
    keys = existing_keys(job.secret_file) if job.secret_file else None
    if not (job.machine or job.config or job.targets or job.calibrate):
        raise ConfigError("there is nothing to check; give an address or --config, or drop --no-machine")
    given = storage.read_file(job.config) if job.config else storage.ConfigFile((), ())
    sections: list[ReportSection] = []
    if job.calibrate:
        path = next((config.costs for config in given.configs if config.costs), None)
        # First and alone: the checks below load libraries, and would disturb what is timed.
        measured = run_check("calibration", _CALIBRATION_SECONDS, partial(calibrate, path, progress))
        sections.append(ReportSection("costs of transfers on this machine", tuple(measured)))
    timed: ReadTimings | None = None
    if (job.machine or job.config) and not is_linux():
        unchecked = note(
            "system",
            f"{platform.system()} runs no engines, so neither this machine nor the tiers of a configuration "
            "are checked",
            "run kvferry doctor on the engines' machines",
        )
        sections.append(ReportSection("this machine", (unchecked,)))
    elif job.machine:
        several = names_other_machines(job.targets, given.configs)
        found, timed = _check_machine(given.configs, progress, several_machines=several)
        sections.append(ReportSection("this machine", tuple(found)))
    if job.config:
        progress("checking the configuration")
        tried = _check_config(given.configs, timed) if is_linux() else []
        named = (*given.findings, *tried)
        sections.append(ReportSection(f"configuration {job.config}", named))
    if job.targets:
        progress("connecting to engines")
        engines, seen = examine_engines(job.targets, keys or _find_keys(given.configs))
        local = timed.summary if timed else ""
        sections += [*engines, *pairs.check(seen, _load_costs(given.configs), local)]
    return sections


def names_other_machines(targets: Sequence[Target], configs: Sequence[ConnectorConfig]) -> bool:
    """Return whether the engines or the configuration to check name a machine other than this one."""
    hosts = [
        target.control[0] if target.control else urlsplit(target.url or "").hostname for target in targets
    ]
    for config in configs:
        if config.transfers:
            hosts += [config.advertise_host or config.host, *(config.peers or ())]
    return any(host is not None and not is_loopback(host) for host in hosts)


def _check_machine(
    configs: tuple[ConnectorConfig, ...], progress: Callable[[str], None], *, several_machines: bool
) -> tuple[list[Finding], ReadTimings | None]:
    """Return findings and the times of READs between two processes; None if no READ was timed."""
    found = run_check("limits", _QUICK_SECONDS, machine.check)
    if not any(config.secret_file or not config.transfers for config in configs):
        found.append(listening.key(None))
    progress("loading vLLM, the connector and NIXL's plugins")
    version = nixl_version()
    # Both mostly load libraries, and neither is timed.
    with ThreadPoolExecutor() as beside:
        loading = beside.submit(run_check, "vLLM", _LONG_SECONDS, software.check)
        found_nixl = run_check("NIXL", _LONG_SECONDS, lambda: nixl.check(version))
        found += [*loading.result(), *found_nixl]
    timed: ReadTimings | None = None
    if version is not None:
        progress("reading between two processes")
        check_reads = partial(reads.check, several_machines=several_machines)
        for one in run_check("NIXL reads", _LONG_SECONDS, check_reads):
            if isinstance(one, ReadTimings):
                timed = one
            else:
                found.append(one)
        gpus = visible_devices().gpus
        found += run_check("NIXL reads of GPU memory", _LONG_SECONDS, partial(reads.check_gpu, gpus))
    if not any(config.costs for config in configs):
        found.append(costs.check(None, timed))
    return found, timed


def _check_config(configs: tuple[ConnectorConfig, ...], timed: ReadTimings | None) -> list[Finding]:
    """Check the listening addresses, costs files and tiers that configurations name, on this machine."""
    found: list[Finding] = []
    for config in configs:
        found += run_check("listening", _QUICK_SECONDS, partial(listening.check, config))
        if config.costs:
            found.append(costs.check(config.costs, timed))
        if (tiers := read_tiers(config.tiers)) is not None:
            found += storage.check(tiers)
            found += engine_metrics.of_config(config)
    return found


def _find_keys(configs: tuple[ConnectorConfig, ...]) -> Keys | None:
    """Return the keys of the first key file that exists: those of configurations, then this machine's."""
    for path in (*(config.secret_file for config in configs if config.secret_file), None):
        with suppress(ConfigError):  # `listening.key` reports it
            if keys := existing_keys(path):
                return keys
    return None


def _load_costs(configs: tuple[ConnectorConfig, ...]) -> Costs:
    try:
        return load_costs(next((config.costs for config in configs if config.costs), None))
    except ConfigError:
        return Costs()
