"""`kvferry config`: what makes an engine exchange KV."""

from __future__ import annotations

from typing import Annotated

import typer

from kvferry.serving.role import Role


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("config")(config)


def config(
    role: Annotated[Role, typer.Option(help="What the engine does.")] = Role.BOTH,
    host: Annotated[
        str | None, typer.Option(help="Address to listen on; node: each rank's machine's.")
    ] = None,
    port: Annotated[int | None, typer.Option(help="Its port; any free one if not given.")] = None,
    advertise_host: Annotated[str | None, typer.Option(help="Address that peers are told.")] = None,
    secret_file: Annotated[str | None, typer.Option(help="File with a secret both engines share.")] = None,
    allow_insecure: Annotated[
        bool | None, typer.Option("--allow-insecure", help="Listen beyond loopback without a secret.")
    ] = None,
    lease_seconds: Annotated[float | None, typer.Option(help="How long blocks wait for a consumer.")] = None,
    load_timeout_seconds: Annotated[float | None, typer.Option(help="When a load is given up.")] = None,
    handshake_seconds: Annotated[float | None, typer.Option(help="When a silent peer is given up.")] = None,
    attempts: Annotated[int | None, typer.Option(help="Loads tried before a prompt is computed.")] = None,
    transfer_log: Annotated[str | None, typer.Option(help="File that gets a line per finished load.")] = None,
    layout: Annotated[
        str | None, typer.Option(help="Memory layout: auto, engine, or one such as BLHNC.")
    ] = None,
    strategy: Annotated[str | None, typer.Option(help="auto, direct, over-read or staged.")] = None,
    staging_mib: Annotated[
        int | None, typer.Option(help="Memory for packing, per direction; 0: none.")
    ] = None,
    lanes: Annotated[int | None, typer.Option(help="Threads per worker that read.")] = None,
    costs: Annotated[str | None, typer.Option(help="File of kvferry bench calibrate.")] = None,
    tiers: Annotated[
        str | None, typer.Option(help='Where chunks are kept: default, or JSON: [{"type": "host"}, ...].')
    ] = None,
    transfer: Annotated[
        bool | None,
        typer.Option(
            "--transfer/--no-transfer",
            help="Exchange KV with other engines; by default without tiers, or with role prefill or decode.",
        ),
    ] = None,
    chunk_tokens: Annotated[int | None, typer.Option(help="Tokens of a chunk in the tiers.")] = None,
    snapshot_tokens: Annotated[
        int | None, typer.Option(help="Distance at which windows and snapshots are kept.")
    ] = None,
    policy: Annotated[str | None, typer.Option(help="Which source serves: weight, cost or first.")] = None,
    load_weight: Annotated[float | None, typer.Option(help="Weight of what peers offer.")] = None,
    patience_seconds: Annotated[
        float | None, typer.Option(help="How long a request waits for a source that is looking.")
    ] = None,
    turn_seconds: Annotated[
        float | None, typer.Option(help="How long blocks are kept for a conversation's next turn; 0: not.")
    ] = None,
    turn_share: Annotated[
        float | None, typer.Option(help="Share of the block pool that they may be at most.")
    ] = None,
    explain_requests: Annotated[
        int | None, typer.Option(help="Requests remembered for kvferry explain; 0: none.")
    ] = None,
    beside: Annotated[
        str | None,
        typer.Option(help='Other connectors of the engine, JSON: [{"kv_connector": "NixlConnector"}, ...].'),
    ] = None,
) -> None:
    """Print the JSON for vLLM's --kv-transfer-config, in one line.

    vllm serve MODEL --kv-transfer-config "$(kvferry config --role decode)"
    """
    from kvferry.serving import kv_config

    settings = {
        "host": host,
        "port": port,
        "advertise_host": advertise_host,
        "secret_file": secret_file,
        "allow_insecure": allow_insecure,
        "lease_seconds": lease_seconds,
        "load_timeout_seconds": load_timeout_seconds,
        "handshake_seconds": handshake_seconds,
        "attempts": attempts,
        "transfer_log": transfer_log,
        "layout": layout,
        "strategy": strategy,
        "staging_mib": staging_mib,
        "lanes": lanes,
        "costs": costs,
        "tiers": kv_config.tiers_of(tiers),
        "transfer": transfer,
        "chunk_tokens": chunk_tokens,
        "snapshot_tokens": snapshot_tokens,
        "policy": policy,
        "load_weight": load_weight,
        "patience_seconds": patience_seconds,
        "turn_seconds": turn_seconds,
        "turn_share": turn_share,
        "explain_requests": explain_requests,
    }
    whole = kv_config.kv_transfer_config(role, settings, alone=beside is None)
    if beside is not None:
        whole = kv_config.beside(whole, kv_config.others_of(beside))
    print(kv_config.kv_transfer_json(whole))
