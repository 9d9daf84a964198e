"""`kvferry router`: one endpoint for engines that are already running."""

from __future__ import annotations

import logging
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import typer

from kvferry.tools.cli.options import command, count, flag, option
from kvferry.extras import ROUTER, require

_MIB = 1 << 20


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
    from kvferry.errors import ConfigError
    from kvferry.tools.serving.ports import listen, url_of
    from kvferry.tools.serving.router.app import RouterApp
    from kvferry.tools.serving.router.engines_file import read_engines
    from kvferry.tools.serving.router.keys import read_keys
    from kvferry.tools.serving.router.settings import RouterSettings
    from kvferry.tools.serving.run import run_app
    from kvferry.tools.serving.signals import StopSignals

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
        max_body_bytes=options.max_body_mib * _MIB,
        api_keys=read_keys(options.api_key_file, "KVFERRY_ROUTER_API_KEY"),
        engine_key=next(iter(engine_keys), None),
        allowed_origins=tuple(options.allow_origin or ()),
        min_prefill_tokens=options.min_prefill_tokens,
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
