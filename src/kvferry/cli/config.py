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
        str | None, typer.Option(help="Address to listen on; node for that of each rank's own machine.")
    ] = None,
    port: Annotated[
        int | None, typer.Option(help="Port of the control channel; by default any free one.")
    ] = None,
    advertise_host: Annotated[
        str | None, typer.Option(help="Address to advertise to peers; by default --host.")
    ] = None,
    secret_file: Annotated[
        str | None, typer.Option(help="File with the secret that both engines share.")
    ] = None,
    allow_insecure: Annotated[
        bool | None, typer.Option("--allow-insecure", help="Listen beyond loopback without a secret.")
    ] = None,
    lease_seconds: Annotated[
        float | None, typer.Option(help="Seconds that blocks are kept for a silent consumer.")
    ] = None,
    load_timeout_seconds: Annotated[
        float | None, typer.Option(help="Seconds after which a load is given up.")
    ] = None,
    handshake_seconds: Annotated[
        float | None, typer.Option(help="Seconds after which a silent peer is given up.")
    ] = None,
    attempts: Annotated[int | None, typer.Option(help="Loads to try before the prompt is computed.")] = None,
    transfer_log: Annotated[
        str | None, typer.Option(help="File that gets one JSON line per finished load.")
    ] = None,
    layout: Annotated[
        str | None, typer.Option(help="Memory layout: auto, engine, or a name such as BLHNC.")
    ] = None,
    strategy: Annotated[
        str | None, typer.Option(help="How bytes travel: auto, direct, over-read or staged.")
    ] = None,
    staging_mib: Annotated[
        int | None, typer.Option(help="MiB per worker and direction for packing; 0 for none.")
    ] = None,
    lanes: Annotated[int | None, typer.Option(help="Reading threads per worker.")] = None,
    costs: Annotated[str | None, typer.Option(help="File that `kvferry bench calibrate` wrote.")] = None,
    tiers: Annotated[
        str | None, typer.Option(help='Tiers that keep chunks: default, or JSON: [{"type": "host"}, ...].')
    ] = None,
    transfer: Annotated[
        bool | None,
        typer.Option(
            "--transfer/--no-transfer",
            help="Exchange KV with other engines; by default without tiers, or with role prefill or decode.",
        ),
    ] = None,
    chunk_tokens: Annotated[int | None, typer.Option(help="Tokens per chunk in the tiers.")] = None,
    snapshot_tokens: Annotated[
        int | None, typer.Option(help="Tokens between kept windows and state snapshots.")
    ] = None,
    policy: Annotated[str | None, typer.Option(help="How to choose a source: weight, cost or first.")] = None,
    load_weight: Annotated[
        float | None, typer.Option(help="Weight of tokens that peers offer (policy weight).")
    ] = None,
    patience_seconds: Annotated[
        float | None, typer.Option(help="Seconds that a request waits for a source that is still looking.")
    ] = None,
    turn_seconds: Annotated[
        float | None,
        typer.Option(help="Seconds that blocks are kept for a conversation's next turn; 0 for none."),
    ] = None,
    turn_share: Annotated[
        float | None, typer.Option(help="Largest share of the block pool to keep for next turns.")
    ] = None,
    explain_requests: Annotated[
        int | None, typer.Option(help="Requests to remember for kvferry explain; 0 for none.")
    ] = None,
    beside: Annotated[
        str | None,
        typer.Option(
            help='Other connectors in the engine, as JSON: [{"kv_connector": "NixlConnector"}, ...].'
        ),
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
