"""`kvferry serve`: start and stop engines and a router together."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import typer

from kvferry.cli import serve_options as opt
from kvferry.cli.options import without_none
from kvferry.cli.output import check_output
from kvferry.cli.settings_file import SettingsFile, read_settings
from kvferry.errors import ConfigError
from kvferry.extras import VLLM, require
from kvferry.operating_system import require_linux
from kvferry.serving.role import Role
from kvferry.units import counted

if TYPE_CHECKING:
    from kvferry.serving.specs import EngineGroup


def serve(
    model: opt.Model,
    vllm_args: opt.VllmArgs = None,
    role: opt.RoleName = None,
    engines: opt.Engines = None,
    prefill: opt.Prefill = None,
    decode: opt.Decode = None,
    tp: opt.Tp = 1,
    prefill_tp: opt.PrefillTp = None,
    decode_tp: opt.DecodeTp = None,
    prefill_args: opt.PrefillArgs = "",
    decode_args: opt.DecodeArgs = "",
    settings: SettingsFile = None,
    tiers: opt.Tiers = None,
    host: opt.Host = "127.0.0.1",
    port: opt.Port = 8000,
    turn_seconds: opt.TurnSeconds = 0,
    log_dir: opt.LogDir = None,
    startup_timeout: opt.StartupTimeout = 600,
    restarts: opt.MaxRestarts = 5,
) -> None:
    """Start engines and a router on this machine.

    Starts engines of MODEL, and one OpenAI endpoint in front of them: prefill and decode engines, or with
    --role both engines that do both. Ctrl-C stops all of them.
    """
    require_linux("kvferry serve")
    require("kvferry serve", VLLM)
    from rich.console import Console

    from kvferry.engines.vllm.version import check_release, vllm_version
    from kvferry.serving.kv_config import parse_tiers
    from kvferry.serving.model_name import check_model
    from kvferry.serving.ports import listen
    from kvferry.serving.restarts import RestartPolicy
    from kvferry.serving.serve import serve_fleet
    from kvferry.serving.shared_memory import check_shared_memory
    from kvferry.serving.signals import StopSignals
    from kvferry.serving.specs import EngineGroup, group_specs, split_arguments
    from kvferry.serving.temporary import temporary_folder

    check_release(vllm_version())
    common = {**read_settings(settings), **without_none(tiers=parse_tiers(tiers))}
    if role is Role.BOTH:
        groups = _both(
            {"--prefill": prefill, "--decode": decode, "--prefill-tp": prefill_tp, "--decode-tp": decode_tp,
             "--prefill-args": prefill_args, "--decode-args": decode_args, "--turn-seconds": turn_seconds},
            EngineGroup(role=Role.BOTH, count=1 if engines is None else engines, tensor_parallel=tp,
                        settings=common, arguments=vllm_args or ()),
        )  # fmt: skip
    else:
        _check_pair(role, engines)
        sides = (
            (Role.PREFILL, prefill, prefill_tp, prefill_args, None),
            (Role.DECODE, decode, decode_tp, decode_args, turn_seconds or common.get("turn_seconds")),
        )
        groups = tuple(
            EngineGroup(
                role=side,
                count=1 if count is None else count,
                tensor_parallel=tp if ranks is None else ranks,
                settings={**common, "turn_seconds": turn},
                arguments=(*(vllm_args or ()), *split_arguments(f"--{side}-args", text)),
            )
            for side, count, ranks, text, turn in sides
        )
    _check_ports(settings, common, sum(group.count for group in groups))
    specs = group_specs(model, groups)
    check_shared_memory([group.parallel.workers for group in groups for _ in range(group.count)])
    check_output()
    check_model(model)
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    # Open the port first: it may be in use, and engines take a while to start.
    with StopSignals() as signals, listen(host, port) as sock, contextlib.suppress(KeyboardInterrupt):
        logs = log_dir or temporary_folder("kvferry-")
        console = Console(stderr=True)
        serve_fleet(
            specs,
            sock,
            logs,
            console,
            signals,
            announce=_announce,
            startup_timeout_seconds=startup_timeout,
            restart_policy=RestartPolicy(restarts),
        )
    raise typer.Exit(signals.exit_code)


def _both(of_pairs: Mapping[str, object], group: EngineGroup) -> tuple[EngineGroup, ...]:
    """Return the engines of ``--role both``.

    Args:
        of_pairs: values of the options that only prefill and decode engines have.
        group: engines to start.

    Raises:
        ConfigError: one of these options is given.
    """
    for name, value in of_pairs.items():
        if value not in (None, "", 0):
            raise ConfigError(
                f"{name} is given beside --role both, but it is for prefill and decode engines; use "
                "--engines, --tp and arguments after --, or leave --role out"
            )
    return (group,)


def _check_ports(file: str | None, settings: Mapping[str, Any], engines: int) -> None:
    """Check that no settings give the same port to several engines.

    Raises:
        ConfigError: they do.
    """
    admin = settings.get("admin")
    ports = {"port": settings.get("port"), "admin.port": admin.get("port") if isinstance(admin, dict) else 0}
    if engines > 1 and (same := [name for name, port in ports.items() if port]):
        raise ConfigError(
            f"{same[0]} is {ports[same[0]]} in {file}, and kvferry serve starts {counted(engines, 'engine')} "
            "on this machine; set it to 0 for any free port"
        )


def _check_pair(role: Role | None, engines: int | None) -> None:
    if role is not None:
        raise ConfigError(
            f"--role is {role}, but kvferry serve starts both sides of an exchange; leave it out, or use "
            f'vllm serve with --kv-transfer-config "$(kvferry config --role {role})"'
        )
    if engines is not None:
        raise ConfigError("--engines is given without --role both; use --prefill and --decode, or add it")


def _announce(line: str) -> None:
    print(line, flush=True)
