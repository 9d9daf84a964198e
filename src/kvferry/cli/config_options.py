"""Settings of the connector that `kvferry config` has options for."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Annotated, Any

import typer

SETTINGS: Mapping[str, Any] = {
    "host": Annotated[
        str | None, typer.Option(help="Address to listen on; node for that of each rank's own machine.")
    ],
    "port": Annotated[int | None, typer.Option(help="Port of the control channel; by default any free one.")],
    "advertise_host": Annotated[
        str | None, typer.Option(help="Address to advertise to peers; by default --host.")
    ],
    "secret_file": Annotated[
        str | None,
        typer.Option(help="File with the secret that engines share; by default this machine's key."),
    ],
    "peers": Annotated[
        list[str] | None,
        typer.Option(
            help="Host name, address or network of other engines; repeatable; by default this machine if "
            "--host is loopback, else all."
        ),
    ],
    "lease_seconds": Annotated[
        float | None, typer.Option(help="Seconds that blocks are kept for a silent consumer.")
    ],
    "load_timeout_seconds": Annotated[
        float | None, typer.Option(help="Seconds after which a load is given up.")
    ],
    "handshake_seconds": Annotated[
        float | None, typer.Option(help="Seconds after which a silent peer is given up.")
    ],
    "attempts": Annotated[int | None, typer.Option(help="Loads to try before the prompt is computed.")],
    "transfer_log": Annotated[
        str | None, typer.Option(help="File that gets one JSON line per finished load.")
    ],
    "layout": Annotated[
        str | None, typer.Option(help="Memory layout: auto, engine, or a name such as BLHNC.")
    ],
    "strategy": Annotated[
        str | None, typer.Option(help="How bytes travel: auto, direct, over-read or staged.")
    ],
    "staging_mib": Annotated[
        int | None, typer.Option(help="MiB per worker and direction for packing; 0 for none.")
    ],
    "lanes": Annotated[int | None, typer.Option(help="Reading threads per worker.")],
    "costs": Annotated[str | None, typer.Option(help="File that `kvferry bench calibrate` wrote.")],
    "tiers": Annotated[
        str | None, typer.Option(help='Tiers that keep chunks: default, or JSON: [{"type": "host"}, ...].')
    ],
    "transfer": Annotated[
        bool | None,
        typer.Option(
            "--transfer/--no-transfer",
            help="Exchange KV with other engines; by default without tiers, or with role prefill or decode.",
        ),
    ],
    "chunk_tokens": Annotated[int | None, typer.Option(help="Tokens per chunk in the tiers.")],
    "snapshot_tokens": Annotated[
        int | None, typer.Option(help="Tokens between kept windows and state snapshots.")
    ],
    "policy": Annotated[str | None, typer.Option(help="How to choose a source: weight, cost or first.")],
    "load_weight": Annotated[
        float | None, typer.Option(help="Weight of tokens that peers offer (policy weight).")
    ],
    "patience_seconds": Annotated[
        float | None, typer.Option(help="Seconds that a request waits for a source that is still looking.")
    ],
    "turn_seconds": Annotated[
        float | None,
        typer.Option(help="Seconds that blocks are kept for a conversation's next turn; 0 for none."),
    ],
    "turn_share": Annotated[
        float | None, typer.Option(help="Largest share of the block pool to keep for next turns.")
    ],
    "explain_requests": Annotated[
        int | None, typer.Option(help="Requests to remember for kvferry explain; 0 for none.")
    ],
}
"""Key of `ConnectorConfig` to its option, in the order of the help."""


def with_settings(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command an option for each setting, behind its first parameter, in place of ``**settings``.

    Typer makes options of a function's signature; this mutates that of `command`.
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
