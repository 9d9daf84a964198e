"""`kvferry config`: what makes an engine exchange KV."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from kvferry.cli.config_options import with_settings
from kvferry.serving.role import Role


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("config")(config)


@with_settings
def config(
    role: Annotated[Role, typer.Option(help="What the engine does.")] = Role.BOTH,
    *,
    beside: Annotated[
        str | None,
        typer.Option(
            help='Other connectors in the engine, as JSON: [{"kv_connector": "NixlConnector"}, ...].'
        ),
    ] = None,
    **settings: Any,
) -> None:
    """Print the JSON for vLLM's --kv-transfer-config, in one line.

    vllm serve MODEL --kv-transfer-config "$(kvferry config --role decode)"
    """
    from kvferry.serving import kv_config

    settings["tiers"] = kv_config.tiers_of(settings["tiers"])
    whole = kv_config.kv_transfer_config(role, settings, alone=beside is None)
    if beside is not None:
        whole = kv_config.beside(whole, kv_config.others_of(beside))
    print(kv_config.kv_transfer_json(whole))
