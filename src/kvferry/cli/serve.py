"""`kvferry serve`: start and stop engines and a router together."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvferry.cli.extras import VLLM, require
from kvferry.cli.output import check_output
from kvferry.errors import ConfigError
from kvferry.operating_system import require_linux
from kvferry.serving.role import Role

if TYPE_CHECKING:
    from kvferry.serving.specs import EngineGroup


def serve(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Path or id of a model that vLLM can load.")],
    vllm_args: Annotated[
        list[str] | None, typer.Argument(metavar="-- VLLM_ARGS", help="Arguments for every engine.")
    ] = None,
    role: Annotated[
        Role | None,
        typer.Option(help="both for engines that serve alone; by default prefill and decode engines."),
    ] = None,
    engines: Annotated[
        int | None, typer.Option(metavar="COUNT", help="Number of engines, with --role both; by default 1.")
    ] = None,
    prefill: Annotated[
        int | None, typer.Option(metavar="COUNT", help="Number of prefill engines; by default 1.")
    ] = None,
    decode: Annotated[
        int | None, typer.Option(metavar="COUNT", help="Number of decode engines; by default 1.")
    ] = None,
    tp: Annotated[int, typer.Option(metavar="COUNT", help="Tensor-parallel ranks of each engine.")] = 1,
    prefill_tp: Annotated[
        int | None, typer.Option(metavar="COUNT", help="The same for prefill engines; by default --tp.")
    ] = None,
    decode_tp: Annotated[
        int | None, typer.Option(metavar="COUNT", help="The same for decode engines; by default --tp.")
    ] = None,
    prefill_args: Annotated[
        str, typer.Option(metavar="TEXT", help="More arguments for prefill engines, as in a shell.")
    ] = "",
    decode_args: Annotated[
        str, typer.Option(metavar="TEXT", help="More arguments for decode engines, as in a shell.")
    ] = "",
    tiers: Annotated[
        str | None,
        typer.Option(
            metavar="JSON", help='Tiers of every engine: default, or JSON: [{"type": "host"}, ...].'
        ),
    ] = None,
    host: Annotated[str, typer.Option(metavar="ADDRESS", help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(metavar="PORT", min=0, max=65535, help="Port to listen on; 0 for any.")
    ] = 8000,
    turn_seconds: Annotated[
        float,
        typer.Option(
            metavar="SECONDS", help="Time that decode engines keep an answer's KV for the next turn."
        ),
    ] = 0,
    log_dir: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Folder for the engines' logs; by default a temporary one."),
    ] = None,
    startup_timeout: Annotated[
        float, typer.Option(metavar="SECONDS", min=1, help="Time for all engines to become ready.")
    ] = 600,
    restarts: Annotated[
        int,
        typer.Option(metavar="COUNT", min=0, help="Restarts in a row of an engine that ends; 0 for none."),
    ] = 5,
) -> None:
    """Start engines and a router on this machine.

    Starts engines of MODEL, and one OpenAI endpoint in front of them: prefill and decode engines, or with
    --role both engines that do both. Ctrl-C stops all of them.
    """
    require("kvferry serve", VLLM)
    require_linux("kvferry serve")
    from rich.console import Console

    from kvferry.engines.vllm.version import check_release, vllm_version
    from kvferry.serving.kv_config import parse_tiers
    from kvferry.serving.ports import listen
    from kvferry.serving.restarts import RestartPolicy
    from kvferry.serving.serve import serve_fleet
    from kvferry.serving.shared_memory import check_shared_memory
    from kvferry.serving.signals import StopSignals
    from kvferry.serving.specs import EngineGroup, group_specs, split_arguments
    from kvferry.serving.temporary import temporary_folder

    check_release(vllm_version())
    parsed = parse_tiers(tiers)
    if role is Role.BOTH:
        groups = _both(
            {"--prefill": prefill, "--decode": decode, "--prefill-tp": prefill_tp, "--decode-tp": decode_tp,
             "--prefill-args": prefill_args, "--decode-args": decode_args, "--turn-seconds": turn_seconds},
            EngineGroup(role=Role.BOTH, count=1 if engines is None else engines, tensor_parallel=tp,
                        settings={"tiers": parsed}, arguments=vllm_args or ()),
        )  # fmt: skip
    else:
        _check_pair(role, engines)
        groups = (
            EngineGroup(
                role=Role.PREFILL,
                count=1 if prefill is None else prefill,
                tensor_parallel=tp if prefill_tp is None else prefill_tp,
                settings={"tiers": parsed},
                arguments=(*(vllm_args or ()), *split_arguments("--prefill-args", prefill_args)),
            ),
            EngineGroup(
                role=Role.DECODE,
                count=1 if decode is None else decode,
                tensor_parallel=tp if decode_tp is None else decode_tp,
                settings={"tiers": parsed, "turn_seconds": turn_seconds or None},
                arguments=(*(vllm_args or ()), *split_arguments("--decode-args", decode_args)),
            ),
        )
    specs = group_specs(model, groups)
    check_shared_memory([group.parallel.workers for group in groups for _ in range(group.count)])
    check_output()
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
