"""`kvferry config`: print the engine setting that enables KV transfer and tiers."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping
from typing import Annotated, Any

import typer

from kvferry.cli.options import count_option, without_none
from kvferry.cli.settings_file import SettingsFile, read_settings
from kvferry.errors import ConfigError
from kvferry.serving.role import Role

SETTINGS: Mapping[str, tuple[Any, str | None, str]] = {
    "host": (str, "ADDRESS", "Address to listen on; node for the address of each rank's machine."),
    "port": (int, "PORT", "Port of the control channel; by default any free one."),
    "ports": (str, "FIRST-LAST", "TCP ports to listen on for peers, such as 20000-20999; by default any."),
    "advertise_host": (str, "ADDRESS", "Address to advertise to peers; by default --host."),
    "secret_file": (str, "FILE", "File with the secret that engines share; by default this machine's key."),
    "peers": (
        list[str],
        "PEER",
        (
            "Host name, address or network of other engines, or HOST:PORT to meet one at the start; "
            "repeatable; by default this machine if --host is loopback, else all."
        ),
    ),
    "lease_seconds": (float, "SECONDS", "Time that blocks are kept for a consumer that sends no heartbeats."),
    "load_timeout_seconds": (float, "SECONDS", "Timeout of a load."),
    "handshake_seconds": (float, "SECONDS", "Timeout of the handshake with a peer."),
    "attempts": (int, "COUNT", "Number of loads to try before the prompt is computed."),
    "late_blocks": (float, "SHARE", "Largest share of the block pool that loads from peers hold."),
    "transfer_log": (str, "FILE", "File that gets one JSON line per finished load."),
    "record": (str, "FILE", "File that gets one JSON line per ended request, for kvferry replay."),
    "layout": (str, "NAME", "Memory layout: auto, engine, or a name such as BLHNC."),
    "strategy": (str, "NAME", "Transfer strategy: auto, direct, over-read, staged or shared."),
    "staging_mib": (int, "MIB", "Staging memory per worker and direction; 0 for none."),
    "lanes": (int, "COUNT", "Number of reading threads per worker."),
    "costs": (str, "FILE", "File that `kvferry doctor --calibrate` wrote."),
    "host_buffer": (bool, None, "Transfer through host memory; by default if kv_buffer_device asks for it."),
    "admin": (str, "JSON", 'Address of the admin API: {"port": 5700}; by default there is none.'),
    "tiers": (str, "JSON", 'Tiers that store chunks: default, or JSON: [{"type": "host"}, ...].'),
    "transfer": (
        bool,
        None,
        "Exchange KV with other engines; by default without tiers, or with role prefill or decode.",
    ),
    "chunk_tokens": (int, "COUNT", "Tokens per chunk in the tiers."),
    "snapshot_tokens": (int, "COUNT", "Tokens between kept windows and state snapshots."),
    "first_snapshot_tokens": (int, "COUNT", "First position of a snapshot for shared prefixes; 0 for none."),
    "tier_loads": (int, "COUNT", "Number of loads from tiers at a time."),
    "source_policy": (str, "NAME", "Policy for choosing a source: weight, cost or first."),
    "load_weight": (float, "WEIGHT", "Weight of tokens that peers offer (source policy weight)."),
    "patience_seconds": (
        float,
        "SECONDS",
        "Time that a request waits for a source that is still looking up its KV.",
    ),
    "turn_seconds": (
        float,
        "SECONDS",
        "Time that blocks are kept for a conversation's next turn; 0 for none.",
    ),
    "turn_share": (float, "SHARE", "Largest share of the block pool to keep for next turns."),
    "whole_blocks": (bool, None, "Refuse loads that fill a block only in part."),
    "name": (str, "NAME", "Name of this connector in kvferry explain."),
    "explain_requests": (int, "COUNT", "Number of requests to remember for kvferry explain; 0 for none."),
}
"""Options by key of `ConnectorConfig`: type, placeholder and help text. They are in the order of the help."""


def _with_settings(command: Callable[..., None]) -> Callable[..., None]:
    """Decorate a command that takes ``**settings``, so that it gets one option per key of `SETTINGS`.

    Typer creates the options from the command's signature. The decorator therefore replaces ``**settings`` in
    the signature by one parameter per option, after the first parameter.
    """
    first, *others = (
        one
        for one in inspect.signature(command, eval_str=True).parameters.values()
        if one.kind is not inspect.Parameter.VAR_KEYWORD
    )
    options = (
        inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=None,
            annotation=Annotated[
                kind | None,
                count_option(text)
                if (kind, metavar) == (int, "COUNT")
                else typer.Option(metavar=metavar, help=text),
            ],
        )
        for name, (kind, metavar, text) in SETTINGS.items()
    )
    command.__signature__ = inspect.Signature([first, *options, *others])  # type: ignore[attr-defined]
    return command


@_with_settings
def config(
    role: Annotated[Role, typer.Option(help="Role of the engine.")] = Role.BOTH,
    *,
    other_connectors: Annotated[
        str | None,
        typer.Option(
            metavar="JSON",
            help='Other connectors in the engine, as JSON: [{"kv_connector": "NixlConnector"}, ...].',
        ),
    ] = None,
    settings_file: SettingsFile = None,
    show_defaults: Annotated[
        bool,
        typer.Option("--show-defaults", help="Print every setting in a line, and mark the defaults."),
    ] = False,
    machine: Annotated[
        bool,
        typer.Option(
            "--machine/--no-machine",
            help="Check this machine too, on which the engine will run: its addresses, files and memory.",
        ),
    ] = True,
    **settings: Any,
) -> None:
    """Print the JSON for vLLM's --kv-transfer-config, in one line."""
    from kvferry.operating_system import is_linux
    from kvferry.serving import kv_config
    from kvferry.serving.cpu_attention import REMEDY, bfloat16_fault
    from kvferry.serving.shown_settings import complete_settings

    if show_defaults and other_connectors is not None:
        raise ConfigError("--show-defaults prints kvferry's own settings only; leave --other-connectors out")
    settings["tiers"] = kv_config.parse_tiers(settings["tiers"])
    settings["admin"] = kv_config.parse_admin(settings["admin"])
    settings = {**read_settings(settings_file), **without_none(**settings)}
    whole = kv_config.kv_transfer_config(
        role, settings, alone=other_connectors is None, machine=machine and is_linux()
    )
    if machine and is_linux() and (fault := bfloat16_fault()):
        print(f"kvferry: note: {fault}; {REMEDY}", file=sys.stderr)
    if show_defaults:
        print(*complete_settings(whole), sep="\n")
        return
    if other_connectors is not None:
        whole = kv_config.with_other_connectors(whole, kv_config.parse_connectors(other_connectors))
    print(kv_config.kv_transfer_json(whole))
