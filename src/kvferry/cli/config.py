"""`kvferry config`: print the setting that makes an engine exchange or keep KV."""

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
    role: Annotated[Role, typer.Option(help="Role of the engine.")] = Role.BOTH,
    *,
    other_connectors: Annotated[
        str | None,
        typer.Option(
            metavar="JSON",
            help='Other connectors in the engine, as JSON: [{"kv_connector": "NixlConnector"}, ...].',
        ),
    ] = None,
    **settings: Any,
) -> None:
    """Print the JSON for vLLM's --kv-transfer-config, in one line.

    vllm serve MODEL --kv-transfer-config "$(kvferry config --role decode)"
    """
    from kvferry.serving import kv_config

    settings["tiers"] = kv_config.parse_tiers(settings["tiers"])
    whole = kv_config.kv_transfer_config(role, settings, alone=other_connectors is None)
    if other_connectors is not None:
        whole = kv_config.with_other_connectors(whole, kv_config.parse_connectors(other_connectors))
    print(kv_config.kv_transfer_json(whole))
