"""`kvferry serve`: start and stop engines and a router together."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from kvferry.tools.cli.options import argument, command, count, option, without_none
from kvferry.tools.cli.output import check_output
from kvferry.tools.cli.settings_file import read_settings, settings_option
from kvferry.errors import ConfigError
from kvferry.extras import VLLM, require
from kvferry.operating_system import require_linux
from kvferry.tools.serving.role import Role
from kvferry.units import counted

if TYPE_CHECKING:
    from kvferry.tools.serving.specs import EngineGroup


@dataclass(frozen=True)
class ServeOptions:
    """The options of `kvferry serve`."""

    model: str = argument("MODEL", "Path or id of a model that vLLM can load.")
    vllm_args: list[str] | None = argument("-- VLLM_ARGS", "Arguments for every engine.", None)
    role: Role | None = option(
        None, None, "both for engines that serve alone; by default prefill and decode engines."
    )
    engines: int | None = count(None, "Number of engines, with --role both; by default 1.")
    prefill: int | None = count(None, "Number of prefill engines; by default 1.")
    decode: int | None = count(None, "Number of decode engines; by default 1.")
    tp: int = count(1, "Tensor-parallel ranks of each engine.")
    prefill_tp: int | None = count(None, "The same for prefill engines; by default --tp.")
    decode_tp: int | None = count(None, "The same for decode engines; by default --tp.")
    prefill_args: str = option("", "TEXT", "More arguments for prefill engines, as in a shell.")
    decode_args: str = option("", "TEXT", "More arguments for decode engines, as in a shell.")
    settings: str | None = settings_option()
    tiers: str | None = option(
        None, "JSON", 'Tiers of every engine: default, or JSON: [{"type": "host"}, ...].'
    )
    host: str = option("127.0.0.1", "ADDRESS", "Address to listen on.")
    port: int = option(8000, "PORT", "Port to listen on; 0 for any.", min=0, max=65535)
    turn_seconds: float = option(
        0, "SECONDS", "Time that decode engines keep an answer's KV for the next turn."
    )
    log_dir: Path | None = option(None, "DIR", "Folder for the engines' logs; by default a temporary one.")
    startup_timeout: float = option(600, "SECONDS", "Time for all engines to become ready.", min=1)
    restarts: int = option(5, "COUNT", "Restarts in a row of an engine that ends; 0 for none.", min=0)


@command
def serve(options: ServeOptions) -> None:
    """Start engines and a router on this machine.

    Starts engines of MODEL, and one OpenAI endpoint in front of them: prefill and decode engines, or with
    --role both engines that do both. Ctrl-C stops all of them.
    """
    require_linux("kvferry serve")
    require("kvferry serve", VLLM)
    from rich.console import Console

    from kvferry.engines.vllm.version import check_release, vllm_version
    from kvferry.tools.serving.model_name import check_model
    from kvferry.tools.serving.ports import listen
    from kvferry.tools.serving.restarts import RestartPolicy
    from kvferry.tools.serving.serve import serve_fleet
    from kvferry.tools.serving.shared_memory import check_shared_memory
    from kvferry.tools.serving.signals import StopSignals
    from kvferry.tools.serving.specs import group_specs
    from kvferry.tools.serving.temporary import temporary_folder

    check_release(vllm_version())
    groups = _groups(options)
    specs = group_specs(options.model, groups)
    # What can be checked is checked before engines start, which takes minutes.
    check_shared_memory([group.parallel.workers for group in groups for _ in range(group.count)])
    check_output()
    check_model(options.model)
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    # Open the port first: it may be in use, and engines take a while to start.
    with (
        StopSignals() as signals,
        listen(options.host, options.port) as sock,
        contextlib.suppress(KeyboardInterrupt),
    ):
        logs = options.log_dir or temporary_folder("kvferry-")
        console = Console(stderr=True)
        serve_fleet(
            specs,
            sock,
            logs,
            console,
            signals,
            announce=_announce,
            startup_timeout_seconds=options.startup_timeout,
            restart_policy=RestartPolicy(options.restarts),
        )
    raise typer.Exit(signals.exit_code)


def _groups(options: ServeOptions) -> tuple[EngineGroup, ...]:
    """Return the engines to start: prefill and decode engines, or those of ``--role both``.

    Raises:
        ConfigError: options contradict each other, or settings give the same port to several engines.
    """
    from kvferry.tools.serving.kv_config import parse_tiers
    from kvferry.tools.serving.specs import EngineGroup, split_arguments

    common = {**read_settings(options.settings), **without_none(tiers=parse_tiers(options.tiers))}
    everywhere = tuple(options.vllm_args or ())
    if options.role is Role.BOTH:
        _check_both(options)
        groups = [
            EngineGroup(
                role=Role.BOTH,
                count=1 if options.engines is None else options.engines,
                tensor_parallel=options.tp,
                settings=common,
                arguments=everywhere,
            )
        ]
    else:
        _check_pair(options)
        turn_seconds = options.turn_seconds or common.get("turn_seconds")
        groups = [
            EngineGroup(
                role=side,
                count=1 if number is None else number,
                tensor_parallel=options.tp if ranks is None else ranks,
                settings={**common, "turn_seconds": turn},
                arguments=(*everywhere, *split_arguments(f"--{side}-args", text)),
            )
            # Only the decode engine has the answer, with which the next turn's prompt begins.
            for side, number, ranks, text, turn in (
                (Role.PREFILL, options.prefill, options.prefill_tp, options.prefill_args, None),
                (Role.DECODE, options.decode, options.decode_tp, options.decode_args, turn_seconds),
            )
        ]
    _check_ports(options.settings, common, sum(group.count for group in groups))
    return tuple(groups)


def _check_both(options: ServeOptions) -> None:
    for name in (
        "prefill",
        "decode",
        "prefill_tp",
        "decode_tp",
        "prefill_args",
        "decode_args",
        "turn_seconds",
    ):
        if getattr(options, name) not in (None, "", 0):
            raise ConfigError(
                f"--{name.replace('_', '-')} is given beside --role both, but it is for prefill and decode "
                "engines; use --engines, --tp and arguments after --, or leave --role out"
            )


def _check_pair(options: ServeOptions) -> None:
    role = options.role
    if role is not None:
        raise ConfigError(
            f"--role is {role}, but kvferry serve starts both sides of an exchange; leave it out, or use "
            f'vllm serve with --kv-transfer-config "$(kvferry config --role {role})"'
        )
    if options.engines is not None:
        raise ConfigError("--engines is given without --role both; use --prefill and --decode, or add it")


def _check_ports(file: str | None, settings: Mapping[str, Any], engines: int) -> None:
    admin = settings.get("admin")
    ports = {"port": settings.get("port"), "admin.port": admin.get("port") if isinstance(admin, dict) else 0}
    # An engine adds only its data-parallel index to a port.
    if engines > 1 and (same := [name for name, port in ports.items() if port]):
        raise ConfigError(
            f"{same[0]} is {ports[same[0]]} in {file}, and kvferry serve starts {counted(engines, 'engine')} "
            "on this machine; set it to 0 for any free port"
        )


def _announce(line: str) -> None:
    print(line, flush=True)
