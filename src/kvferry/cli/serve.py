"""`kvferry serve`: start and stop engines and a router together."""

from __future__ import annotations

import contextlib
import logging
import sys
from pathlib import Path
from typing import Annotated

import typer

from kvferry.cli.extras import VLLM, require
from kvferry.cli.output import check_output
from kvferry.operating_system import require_linux


def serve(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Path or id of a model that vLLM can load.")],
    vllm_args: Annotated[
        list[str] | None, typer.Argument(metavar="-- VLLM_ARGS", help="Arguments for every engine.")
    ] = None,
    prefill: Annotated[int, typer.Option(metavar="COUNT", help="Number of prefill engines.")] = 1,
    decode: Annotated[int, typer.Option(metavar="COUNT", help="Number of decode engines.")] = 1,
    prefill_tp: Annotated[
        int, typer.Option(metavar="COUNT", help="Tensor-parallel ranks of each prefill engine.")
    ] = 1,
    decode_tp: Annotated[
        int, typer.Option(metavar="COUNT", help="Tensor-parallel ranks of each decode engine.")
    ] = 1,
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
) -> None:
    """Start engines and a router on this machine.

    Starts prefill and decode engines of MODEL, and one OpenAI endpoint in front of them. Ctrl-C stops all of
    them.
    """
    require("kvferry serve", VLLM)
    require_linux("kvferry serve")
    from rich.console import Console

    from kvferry.engines.vllm.version import check_release, vllm_version
    from kvferry.serving.launch import fleet_specs
    from kvferry.serving.ports import listen
    from kvferry.serving.serve import serve_fleet
    from kvferry.serving.signals import StopSignals
    from kvferry.serving.temporary import temporary_folder

    check_release(vllm_version())
    specs = fleet_specs(
        model,
        prefill=prefill,
        decode=decode,
        prefill_tensor_parallel=prefill_tp,
        decode_tensor_parallel=decode_tp,
        decode_settings={"turn_seconds": turn_seconds} if turn_seconds else None,
        arguments=vllm_args or (),
    )
    check_output()
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    # Open the port first: it may be in use, and engines take a while to start.
    with StopSignals() as signals, listen(host, port) as sock, contextlib.suppress(KeyboardInterrupt):
        logs = log_dir or temporary_folder("kvferry-")
        console = Console(stderr=True)
        serve_fleet(
            specs, sock, logs, console, signals, announce=_announce, startup_timeout_seconds=startup_timeout
        )
    raise typer.Exit(signals.exit_code)


def _announce(line: str) -> None:
    print(line, flush=True)
