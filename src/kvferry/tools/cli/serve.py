"""`kvferry serve`: start and stop engines and a router together. `kvferry router`: a router alone."""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from kvferry.common.errors import ConfigError
from kvferry.common.machine import require_linux
from kvferry.common.units import counted
from kvferry.tools.cli.config import read_settings, settings_option
from kvferry.tools.cli.options import argument, check_output, command, count, flag, option, without_none
from kvferry.tools.extras import ROUTER, VLLM, require
from kvferry.tools.serving.role import Role

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

    from kvferry.engines.vllm import check_release, vllm_version
    from kvferry.tools.serving.devices import listen
    from kvferry.tools.serving.machine import check_shared_memory
    from kvferry.tools.serving.machine_checks import check_model
    from kvferry.tools.serving.processes import StopSignals, temporary_folder
    from kvferry.tools.serving.serve import RestartPolicy, serve_fleet
    from kvferry.tools.serving.specs import group_specs

    check_release(vllm_version())
    groups = _groups(options)
    specs = group_specs(options.model, groups)
    # What can be checked is checked before engines start, which takes minutes.
    check_shared_memory([group.parallel.workers for group in groups for _ in range(group.count)])
    check_output()
    check_model(options.model)
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    # Open the port first: it may be in use, and engines take a while to start.
    with StopSignals() as signals, listen(options.host, options.port) as sock, suppress(KeyboardInterrupt):
        serve_fleet(
            specs,
            sock,
            options.log_dir or temporary_folder("kvferry-"),
            Console(stderr=True),
            signals,
            announce=partial(print, flush=True),
            startup_timeout_seconds=options.startup_timeout,
            restart_policy=RestartPolicy(options.restarts),
        )
    raise typer.Exit(signals.exit_code)


def _groups(options: ServeOptions) -> tuple[EngineGroup, ...]:
    """Return the engines to start: prefill and decode engines, or those of ``--role both``.

    Raises:
        ConfigError: options contradict each other, or settings give the same port to several engines.
    """
    from kvferry.tools.serving.kv_config import parse_json
    from kvferry.tools.serving.specs import EngineGroup, split_arguments

    common = {**read_settings(options.settings), **without_none(tiers=parse_json("tiers", options.tiers))}
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
    sides = [f"{side}{what}" for what in ("", "_tp", "_args") for side in ("prefill", "decode")]
    for name in (*sides, "turn_seconds"):
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


@dataclass(frozen=True)
class RouterOptions:
    """The options of `kvferry router`."""

    prefill: list[str] | None = option(None, "URL", "URL, or host and port, of a prefill engine; repeatable.")
    decode: list[str] | None = option(None, "URL", "URL, or host and port, of a decode engine; repeatable.")
    engines_file: Path | None = option(
        None, "FILE", "Engines, one per line as 'decode URL'; changes apply while it runs."
    )
    host: str = option("127.0.0.1", "ADDRESS", "Address to listen on.")
    port: int = option(8000, "PORT", "Port to listen on; 0 for any.", min=0, max=65535)
    silent_seconds: float = option(
        5.0, "SECONDS", "Time after which an engine that answers nothing is given up.", min=1.0
    )
    max_body_mib: int = option(64, "MIB", "Largest request body, in MiB.", min=1)
    min_prefill_tokens: int = count(128, "Decode engines compute fewer new tokens themselves; 0 for none.")
    continue_streams: bool = flag(
        "--continue-streams/--no-continue-streams",
        "Continue a stream at another decode engine if its own fails.",
        default=True,
    )
    follow_events: bool = flag(
        "--follow-events/--no-follow-events",
        "Tell engines which others have a prefix of a prompt, by their KV events.",
        default=True,
    )
    drain_seconds: float = option(25.0, "SECONDS", "Time that running requests have after SIGTERM.", min=0.0)
    api_key_file: Path | None = option(
        None, "FILE", "Keys of which callers must send one; else KVFERRY_ROUTER_API_KEY."
    )
    engine_api_key_file: Path | None = option(
        None, "FILE", "Key to send to engines; else KVFERRY_ENGINE_API_KEY."
    )
    allow_origin: list[str] | None = option(
        None, "ORIGIN", "Origin whose pages may use the router (CORS); repeatable."
    )
    trust_kv_transfer_params: bool = flag(
        "--trust-kv-transfer-params",
        "Keep kv_transfer_params that callers send. Safe only if no user can reach the router.",
    )


@command
def router(options: RouterOptions) -> None:
    """Serve one OpenAI endpoint over running engines.

    Sends each prompt to a prefill engine, then to a decode engine, which loads its KV.
    """
    require("kvferry router", ROUTER)
    from kvferry.tools.serving.devices import listen, url_of
    from kvferry.tools.serving.processes import StopSignals
    from kvferry.tools.serving.router.app import RouterApp
    from kvferry.tools.serving.router.fleet import read_engines
    from kvferry.tools.serving.router.settings import RouterSettings, read_keys
    from kvferry.tools.serving.run import run_app

    if options.engines_file is not None and (options.prefill or options.decode):
        raise ConfigError("--engines-file is given with --prefill or --decode; give either")
    engines = {"prefill": tuple(options.prefill or ()), "decode": tuple(options.decode or ())}
    if options.engines_file is not None:
        engines = read_engines(options.engines_file)
    elif not options.prefill:
        raise ConfigError("the router has no prefill engine; give at least one --prefill URL")
    engine_keys = read_keys(options.engine_api_key_file, "KVFERRY_ENGINE_API_KEY")
    settings = RouterSettings(
        prefill=engines["prefill"],
        decode=engines["decode"],
        engines_file=options.engines_file,
        silent_seconds=options.silent_seconds,
        max_body_bytes=options.max_body_mib << 20,
        api_keys=read_keys(options.api_key_file, "KVFERRY_ROUTER_API_KEY"),
        engine_key=next(iter(engine_keys), None),
        allowed_origins=tuple(options.allow_origin or ()),
        min_prefill_tokens=options.min_prefill_tokens,
        continue_streams=options.continue_streams,
        follow_events=options.follow_events,
        introduce=True,
        trust_kv_params=options.trust_kv_transfer_params,
    )
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    # The port is open before the line is printed, so a script that waits for the line can connect.
    with StopSignals() as signals, listen(options.host, options.port) as sock:
        print(f"kvferry: serving on {url_of(sock)}/v1", flush=True)
        with suppress(KeyboardInterrupt):  # a second signal
            run_app(
                RouterApp(settings),
                sock,
                lambda: signals.received is None,
                options.drain_seconds,
                is_urgent=lambda: signals.repeated,
            )
    raise typer.Exit(signals.exit_code)
