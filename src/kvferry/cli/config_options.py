"""The settings of the connector as options of `kvferry config`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Annotated, Any

import typer

SETTINGS: Mapping[str, Any] = {
    "host": Annotated[
        str | None,
        typer.Option(
            metavar="ADDRESS", help="Address to listen on; node for the address of each rank's machine."
        ),
    ],
    "port": Annotated[
        int | None, typer.Option(metavar="PORT", help="Port of the control channel; by default any free one.")
    ],
    "advertise_host": Annotated[
        str | None, typer.Option(metavar="ADDRESS", help="Address to advertise to peers; by default --host.")
    ],
    "secret_file": Annotated[
        str | None,
        typer.Option(
            metavar="FILE", help="File with the secret that engines share; by default this machine's key."
        ),
    ],
    "peers": Annotated[
        list[str] | None,
        typer.Option(
            metavar="PEER",
            help="Host name, address or network of other engines; repeatable; by default this machine if "
            "--host is loopback, else all.",
        ),
    ],
    "lease_seconds": Annotated[
        float | None,
        typer.Option(metavar="SECONDS", help="Time that blocks are kept for a consumer without heartbeats."),
    ],
    "load_timeout_seconds": Annotated[
        float | None, typer.Option(metavar="SECONDS", help="Timeout of a load.")
    ],
    "handshake_seconds": Annotated[
        float | None, typer.Option(metavar="SECONDS", help="Timeout of the handshake with a peer.")
    ],
    "attempts": Annotated[
        int | None,
        typer.Option(metavar="COUNT", help="Number of loads to try before the prompt is computed."),
    ],
    "transfer_log": Annotated[
        str | None, typer.Option(metavar="FILE", help="File that gets one JSON line per finished load.")
    ],
    "layout": Annotated[
        str | None, typer.Option(metavar="NAME", help="Memory layout: auto, engine, or a name such as BLHNC.")
    ],
    "strategy": Annotated[
        str | None, typer.Option(metavar="NAME", help="Transfer strategy: auto, direct, over-read or staged.")
    ],
    "staging_mib": Annotated[
        int | None, typer.Option(metavar="MIB", help="Staging memory per worker and direction; 0 for none.")
    ],
    "lanes": Annotated[
        int | None, typer.Option(metavar="COUNT", help="Number of reading threads per worker.")
    ],
    "costs": Annotated[
        str | None, typer.Option(metavar="FILE", help="File that `kvferry bench calibrate` wrote.")
    ],
    "tiers": Annotated[
        str | None,
        typer.Option(
            metavar="JSON", help='Tiers that keep chunks: default, or JSON: [{"type": "host"}, ...].'
        ),
    ],
    "transfer": Annotated[
        bool | None,
        typer.Option(
            "--transfer/--no-transfer",
            help="Exchange KV with other engines; by default without tiers, or with role prefill or decode.",
        ),
    ],
    "chunk_tokens": Annotated[
        int | None, typer.Option(metavar="COUNT", help="Tokens per chunk in the tiers.")
    ],
    "snapshot_tokens": Annotated[
        int | None, typer.Option(metavar="COUNT", help="Tokens between kept windows and state snapshots.")
    ],
    "source_policy": Annotated[
        str | None, typer.Option(metavar="NAME", help="Policy for choosing a source: weight, cost or first.")
    ],
    "load_weight": Annotated[
        float | None,
        typer.Option(metavar="WEIGHT", help="Weight of tokens that peers offer (source policy weight)."),
    ],
    "patience_seconds": Annotated[
        float | None,
        typer.Option(metavar="SECONDS", help="Time that a request waits for a source that is still looking."),
    ],
    "turn_seconds": Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS", help="Time that blocks are kept for a conversation's next turn; 0 for none."
        ),
    ],
    "turn_share": Annotated[
        float | None,
        typer.Option(metavar="SHARE", help="Largest share of the block pool to keep for next turns."),
    ],
    "explain_requests": Annotated[
        int | None,
        typer.Option(metavar="COUNT", help="Number of requests to remember for kvferry explain; 0 for none."),
    ],
}
"""Key of `ConnectorConfig` to its option, in the order of the help."""


def with_settings(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command one option per setting, after its first parameter, in place of ``**settings``.

    Mutates the signature of `command`, from which Typer makes the options.
    """
    first, *others = (
        one
        for one in inspect.signature(command, eval_str=True).parameters.values()
        if one.kind is not inspect.Parameter.VAR_KEYWORD
    )
    options = (
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=option)
        for name, option in SETTINGS.items()
    )
    command.__signature__ = inspect.Signature([first, *options, *others])  # type: ignore[attr-defined]
    return command
