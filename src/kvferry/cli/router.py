"""`kvferry router`: one endpoint for engines that are already running."""

from __future__ import annotations

import logging
import sys
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer

from kvferry.cli.options import count_option
from kvferry.extras import ROUTER, require

_MIB = 1 << 20


def router(
    prefill: Annotated[
        list[str] | None,
        typer.Option(metavar="URL", help="URL, or host and port, of a prefill engine; repeatable."),
    ] = None,
    decode: Annotated[
        list[str] | None,
        typer.Option(metavar="URL", help="URL, or host and port, of a decode engine; repeatable."),
    ] = None,
    engines_file: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Engines, one per line as 'decode URL'; changes apply while it runs."
        ),
    ] = None,
    host: Annotated[str, typer.Option(metavar="ADDRESS", help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(metavar="PORT", min=0, max=65535, help="Port to listen on; 0 for any.")
    ] = 8000,
    silent_seconds: Annotated[
        float,
        typer.Option(
            metavar="SECONDS", min=1.0, help="Time after which an engine that answers nothing is given up."
        ),
    ] = 5.0,
    max_body_mib: Annotated[
        int, typer.Option(metavar="MIB", min=1, help="Largest request body, in MiB.")
    ] = 64,
    min_prefill_tokens: Annotated[
        int, count_option("Decode engines compute fewer new tokens themselves; 0 for none.")
    ] = 128,
    drain_seconds: Annotated[
        float,
        typer.Option(metavar="SECONDS", min=0.0, help="Time that running requests have after SIGTERM."),
    ] = 25.0,
    api_key_file: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Keys of which callers must send one; else KVFERRY_ROUTER_API_KEY."
        ),
    ] = None,
    engine_api_key_file: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Key to send to engines; else KVFERRY_ENGINE_API_KEY."),
    ] = None,
    allow_origin: Annotated[
        list[str] | None,
        typer.Option(metavar="ORIGIN", help="Origin whose pages may use the router (CORS); repeatable."),
    ] = None,
    trust_kv_transfer_params: Annotated[
        bool,
        typer.Option(
            "--trust-kv-transfer-params",
            help="Keep kv_transfer_params that callers send. Safe only if no user can reach the router.",
        ),
    ] = False,
) -> None:
    """Serve one OpenAI endpoint over running engines.

    Sends each prompt to a prefill engine, then to a decode engine, which loads its KV.
    """
    require("kvferry router", ROUTER)
    from kvferry.errors import ConfigError
    from kvferry.serving.ports import listen, url_of
    from kvferry.serving.router.app import RouterApp
    from kvferry.serving.router.engines_file import Engines, read_engines
    from kvferry.serving.router.keys import read_keys
    from kvferry.serving.router.settings import RouterSettings
    from kvferry.serving.run import run_app
    from kvferry.serving.signals import StopSignals

    if engines_file is not None and (prefill or decode):
        raise ConfigError("--engines-file is given with --prefill or --decode; give either")
    engines = Engines(tuple(prefill or ()), tuple(decode or ()))
    if engines_file is not None:
        engines = read_engines(engines_file)
    elif not prefill:
        raise ConfigError("the router has no prefill engine; give at least one --prefill URL")
    settings = RouterSettings(
        prefill=engines.prefill,
        decode=engines.decode,
        engines_file=engines_file,
        silent_seconds=silent_seconds,
        max_body_bytes=max_body_mib * _MIB,
        api_keys=read_keys(api_key_file, "KVFERRY_ROUTER_API_KEY"),
        engine_key=next(iter(read_keys(engine_api_key_file, "KVFERRY_ENGINE_API_KEY")), None),
        allowed_origins=tuple(allow_origin or ()),
        min_prefill_tokens=min_prefill_tokens,
        introduce=True,
        trust_kv_params=trust_kv_transfer_params,
    )
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    with StopSignals() as signals, listen(host, port) as sock:
        print(f"kvferry: serving on {url_of(sock)}/v1", flush=True)
        with suppress(KeyboardInterrupt):  # a second signal
            run_app(
                RouterApp(settings),
                sock,
                lambda: signals.received is None,
                drain_seconds,
                is_urgent=lambda: signals.repeated,
            )
    raise typer.Exit(signals.exit_code)
