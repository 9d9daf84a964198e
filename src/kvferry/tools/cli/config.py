"""`kvferry config`: print the engine setting that enables KV transfer and tiers."""

from __future__ import annotations

import sys
from dataclasses import dataclass, fields

from kvferry.tools.cli.options import command, count, flag, option, without_none
from kvferry.tools.cli.settings_file import read_settings, settings_option
from kvferry.errors import ConfigError
from kvferry.tools.serving.role import Role


@dataclass(frozen=True, kw_only=True)
class ConfigOptions:
    """The options of `kvferry config`, among them one for each key of `ConnectorConfig`."""

    role: Role = option(Role.BOTH, None, "Role of the engine.")
    # Not derived from `ConnectorConfig`, whose import takes longer than all of `--help`.
    host: str | None = option(
        None, "ADDRESS", "Address to listen on; node for the address of each rank's machine."
    )
    port: int | None = option(None, "PORT", "Port of the control channel; by default any free one.")
    ports: str | None = option(
        None, "FIRST-LAST", "TCP ports to listen on for peers, such as 20000-20999; by default any."
    )
    advertise_host: str | None = option(None, "ADDRESS", "Address to advertise to peers; by default --host.")
    secret_file: str | None = option(
        None, "FILE", "File with the secret that engines share; by default this machine's key."
    )
    peers: list[str] | None = option(
        None,
        "PEER",
        "Host name, address or network of other engines, or HOST:PORT to meet one at the start; "
        "repeatable; by default this machine if --host is loopback, else all.",
    )
    lease_seconds: float | None = option(
        None, "SECONDS", "Time that blocks are kept for a consumer that sends no heartbeats."
    )
    load_timeout_seconds: float | None = option(None, "SECONDS", "Timeout of a load.")
    handshake_seconds: float | None = option(None, "SECONDS", "Timeout of the handshake with a peer.")
    attempts: int | None = count(None, "Number of loads to try before the prompt is computed.")
    late_blocks: float | None = option(
        None, "SHARE", "Largest share of the block pool that loads from peers hold."
    )
    transfer_log: str | None = option(None, "FILE", "File that gets one JSON line per finished load.")
    record: str | None = option(
        None, "FILE", "File that gets one JSON line per ended request, for kvferry replay."
    )
    layout: str | None = option(None, "NAME", "Memory layout: auto, engine, or a name such as BLHNC.")
    strategy: str | None = option(
        None, "NAME", "Transfer strategy: auto, direct, over-read, staged or shared."
    )
    staging_mib: int | None = option(None, "MIB", "Staging memory per worker and direction; 0 for none.")
    lanes: int | None = count(None, "Number of reading threads per worker.")
    costs: str | None = option(None, "FILE", "File that `kvferry doctor --calibrate` wrote.")
    host_buffer: bool | None = option(
        None, None, "Transfer through host memory; by default if kv_buffer_device asks for it."
    )
    admin: str | None = option(
        None, "JSON", 'Address of the admin API: {"port": 5700}; by default there is none.'
    )
    tiers: str | None = option(
        None, "JSON", 'Tiers that store chunks: default, or JSON: [{"type": "host"}, ...].'
    )
    transfer: bool | None = option(
        None,
        None,
        "Exchange KV with other engines; by default without tiers, or with role prefill or decode.",
    )
    chunk_tokens: int | None = count(None, "Tokens per chunk in the tiers.")
    snapshot_tokens: int | None = count(None, "Tokens between kept windows and state snapshots.")
    first_snapshot_tokens: int | None = count(
        None, "First position of a snapshot for shared prefixes; 0 for none."
    )
    tier_loads: int | None = count(None, "Number of loads from tiers at a time.")
    source_policy: str | None = option(None, "NAME", "Policy for choosing a source: weight, cost or first.")
    load_weight: float | None = option(
        None, "WEIGHT", "Weight of tokens that peers offer (source policy weight)."
    )
    patience_seconds: float | None = option(
        None, "SECONDS", "Time that a request waits for a source that is still looking up its KV."
    )
    turn_seconds: float | None = option(
        None, "SECONDS", "Time that blocks are kept for a conversation's next turn; 0 for none."
    )
    turn_share: float | None = option(
        None, "SHARE", "Largest share of the block pool to keep for next turns."
    )
    whole_blocks: bool | None = option(None, None, "Refuse loads that fill a block only in part.")
    name: str | None = option(None, "NAME", "Name of this connector in kvferry explain.")
    explain_requests: int | None = count(
        None, "Number of requests to remember for kvferry explain; 0 for none."
    )

    other_connectors: str | None = option(
        None, "JSON", 'Other connectors in the engine, as JSON: [{"kv_connector": "NixlConnector"}, ...].'
    )
    settings_file: str | None = settings_option()
    show_defaults: bool = flag("--show-defaults", "Print every setting in a line, and mark the defaults.")
    machine: bool = flag(
        "--machine/--no-machine",
        "Check this machine too, on which the engine will run: its addresses, files and memory.",
        default=True,
    )


SETTINGS = tuple(
    one
    for one in fields(ConfigOptions)
    if one.name not in ("role", "other_connectors", "settings_file", "show_defaults", "machine")
)
"""The fields for keys of `ConnectorConfig`, in the order of the help."""


@command
def config(options: ConfigOptions) -> None:
    """Print the JSON for vLLM's --kv-transfer-config, in one line."""
    from kvferry.operating_system import is_linux
    from kvferry.tools.serving import kv_config
    from kvferry.tools.serving.cpu_attention import REMEDY, bfloat16_fault
    from kvferry.tools.serving.shown_settings import complete_settings

    if options.show_defaults and options.other_connectors is not None:
        raise ConfigError("--show-defaults prints kvferry's own settings only; leave --other-connectors out")
    given = {one.name: getattr(options, one.name) for one in SETTINGS}
    given["tiers"] = kv_config.parse_tiers(given["tiers"])
    given["admin"] = kv_config.parse_admin(given["admin"])
    machine = options.machine and is_linux()
    whole = kv_config.kv_transfer_config(
        options.role,
        {**read_settings(options.settings_file), **without_none(**given)},
        alone=options.other_connectors is None,
        machine=machine,
    )
    if machine and (fault := bfloat16_fault()):
        # On standard error, because the output is used as `--kv-transfer-config "$(kvferry config)"`.
        print(f"kvferry: note: {fault}; {REMEDY}", file=sys.stderr)
    if options.show_defaults:
        print(*complete_settings(whole), sep="\n")
        return
    if options.other_connectors is not None:
        whole = kv_config.with_other_connectors(whole, kv_config.parse_connectors(options.other_connectors))
    print(kv_config.kv_transfer_json(whole))
