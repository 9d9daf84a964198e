"""`kvferry config`, `init` and `keygen`: the setting that enables KV transfer and tiers, and its files."""

from __future__ import annotations

import json
import os
import re
import sys
import tomllib
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, get_type_hints

from kvferry.common.errors import ConfigError
from kvferry.tools.cli.options import TYPER, argument, command, count, flag, option, without_none, writing
from kvferry.tools.report import wrap
from kvferry.tools.serving.role import Role

# Width of the file that `kvferry init` writes.
_COLUMNS = 100


def settings_option() -> Any:
    """Return a field for the option ``--settings``."""
    return option(
        None, "FILE", "Settings to read, as `kvferry init` writes them; options go first.", "--settings"
    )


def read_settings(path: str | None) -> dict[str, Any]:
    """Return the unchecked settings of a TOML file; none without a path.

    Raises:
        ConfigError: the file cannot be read, or is no TOML.
    """
    from kvferry.tools.serving.kv_config import parse_json

    if path is None:
        return {}
    try:
        found = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        reason = os.strerror(error.errno or 0)
        raise ConfigError(f"cannot read {path}: {reason}; `kvferry init FILE` writes such a file") from error
    except ValueError as error:  # not TOML, or not UTF-8
        # tomllib has the line in its message only.
        at = re.search(r"at line (\d+)", str(error))
        where = f"line {at[1]} of {path}" if at else path
        raise ConfigError(
            f"{where} is no TOML; write a setting as in port = 5600, and text in quotation marks"
        ) from error
    # `kvferry init` writes these as JSON in a string, because the options of `config` take JSON.
    for key in ("tiers", "tenants", "admin"):
        if isinstance(found.get(key), str):
            found[key] = parse_json(key, found[key])
    return found


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
    verify_transfers: bool | None = option(
        None, None, "Verify what is read from peers; not for KV caches in GPU memory."
    )
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
    tenants: str | None = option(
        None, "JSON", 'Tenants that share the tiers by weight: {"acme": {"adapter": "acme", "weight": 2}}.'
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
    hint_share: float | None = option(
        None, "SHARE", "Largest share of host memory that hints of requests may keep; 0 for none."
    )
    hint_seconds: float | None = option(
        None, "SECONDS", "Longest time that a request's hint may retain chunks."
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


_OF_COMMAND = frozenset({"role", "other_connectors", "settings_file", "show_defaults", "machine"})
SETTINGS = tuple(one for one in fields(ConfigOptions) if one.name not in _OF_COMMAND)
"""The fields for keys of `ConnectorConfig`, in the order of the help."""


@command
def config(options: ConfigOptions) -> None:
    """Print the JSON for vLLM's --kv-transfer-config, in one line."""
    from kvferry.common.machine import is_linux
    from kvferry.tools.serving import kv_config
    from kvferry.tools.serving.machine_checks import REMEDY, bfloat16_fault

    if options.show_defaults and options.other_connectors is not None:
        raise ConfigError("--show-defaults prints kvferry's own settings only; leave --other-connectors out")
    given = {one.name: getattr(options, one.name) for one in SETTINGS}
    for key in ("tiers", "tenants", "admin"):
        given[key] = kv_config.parse_json(key, given[key])
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
        print(*kv_config.complete_settings(whole), sep="\n")
        return
    if options.other_connectors is not None:
        others = kv_config.parse_json("other_connectors", options.other_connectors)
        whole = kv_config.with_other_connectors(whole, others)
    print(kv_config.kv_transfer_json(whole))


_HEAD = """\
# Settings of kvferry's connector. Remove the # before a setting to change it. A value in capitals stands for
# one that the engine chooses. Relative paths begin in the folder where the command is run.
#   kvferry serve MODEL --settings FILE
#   vllm serve MODEL --kv-transfer-config "$(kvferry config --settings FILE)"
"""


@dataclass(frozen=True)
class InitOptions:
    """The options of `kvferry init`."""

    file: str = argument("FILE", "File to create; - for standard output.", "kvferry.toml")


@command
def init(options: InitOptions) -> None:
    """Write a file with all settings, for --settings of serve and config.

    Every setting is in a comment, with its meaning and its default. An existing file is never overwritten.
    """
    text = settings_text()
    if options.file == "-":
        print(text, end="")
        return
    file = Path(options.file)
    with writing(file):
        # Opened exclusively: a test before it could not see a file that is created meanwhile.
        try:
            created = file.open("x", encoding="utf-8")
        except FileExistsError as error:
            raise ConfigError(
                f"{file} exists and is not overwritten; name another file, or remove it"
            ) from error
        with created:
            created.write(text)
    print(f"{file}: {len(SETTINGS)} settings, all with their defaults")


def settings_text() -> str:
    """Return the content of the file: the settings of `kvferry config`, each in a comment."""
    from kvferry.connector import ConnectorConfig

    defaults, types = ConnectorConfig(), get_type_hints(ConfigOptions)
    return _HEAD + "".join(
        "\n"
        + "".join(f"# {line}\n" for line in wrap(how.help, _COLUMNS - len("# ")))
        + f"#{one.name} = {_value(types[one.name], how.metavar, getattr(defaults, one.name))}\n"
        for one in SETTINGS
        for how in (one.metadata[TYPER],)
    )


def _value(kind: Any, metavar: str | None, default: Any) -> str:
    """Return the default of a setting in TOML, or what stands for its value if the engine chooses it."""
    if default is not None:
        return json.dumps(default)
    if kind == bool | None:
        return "TRUE OR FALSE"
    if kind in (int | None, float | None):
        return str(metavar)
    return json.dumps([metavar] if kind == list[str] | None else metavar)


@dataclass(frozen=True)
class KeygenOptions:
    """The options of `kvferry keygen`."""

    file: str = argument("FILE", "File to create; - for standard output.")


@command
def keygen(options: KeygenOptions) -> None:
    """Create a secret for engines on several machines.

    Copy the file to all machines, and set the engines' secret_file to it: only they can then exchange KV. An
    existing file is never overwritten.
    """
    from kvferry.transport import existing_keys, new_secret, write_secret

    file = options.file
    if file == "-":
        print(new_secret(), end="")
        return
    write_secret(Path(file))
    keys = existing_keys(file)
    # Users compare fingerprints, which the doctor prints too, and never print the secret itself.
    assert keys is not None  # noqa: S101 - it was written
    print(f"{file}: fingerprint {keys.fingerprint}")
