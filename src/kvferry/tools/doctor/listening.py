"""Check the address that an engine would listen on, the machines that could reach it, and its key."""

from __future__ import annotations

import stat

from kvferry.common.errors import ConfigError
from kvferry.connector import NODE, ConnectorConfig
from kvferry.tools.doctor.finding import Finding, from_error, note, ok
from kvferry.tools.serving.machine import PortInUse, check_listening, node_address
from kvferry.transport import existing_keys, is_loopback, key_location, parse_ip


def check(config: ConnectorConfig) -> list[Finding]:
    """Check the network settings of an engine: key, allowed peers, advertised address and port."""
    if not config.transfers:
        listens = "only the fleet tier listens" if config.shares_host_memory else "nothing listens"
        return [ok("listening", f"no KV is handed over, so {listens}")]
    found = [key(config.secret_file)]
    try:
        check_listening(config.host, config.port)
        number = f"{config.port} is free" if config.port else "any free port, a new one at every start"
        free = ok("port", number)
    except PortInUse as error:
        # A running engine may be what has the port, and the other findings are of use all the same.
        free = from_error("port", error)
    except ConfigError as error:
        return [*found, from_error("host", error)]
    host = node_address() if config.host == NODE else config.host
    return [*found, access(config, host), *advertised(config.advertise_host), free]


def key(secret_file: str | None) -> Finding:
    """Check the key file that an engine of this user would use; None for this machine's default key."""
    try:
        place, keys = key_location(secret_file), existing_keys(secret_file)
    except ConfigError as error:
        return from_error("key", error)
    if keys is None:
        return ok("key", f"{place}: created by the first engine that needs it")
    mode = f"{stat.S_IMODE(place.path.stat().st_mode):o}"
    what = "engines with the same fingerprint can exchange KV"
    return ok("key", f"{place} (mode {mode}), fingerprint {keys.fingerprint}: {what}")


def access(config: ConnectorConfig, host: str) -> Finding:
    """Report which other engines could exchange KV with an engine that listens on `host`."""
    advertised_host = config.advertise_host or host
    if is_loopback(host):
        return ok("host", f"{advertised_host}: only engines on this machine can exchange KV")
    if config.secret_file is not None:
        where = f" at {', '.join(config.peers)} (peers)" if config.peers else ""
        return ok("host", f"{advertised_host}: all engines with the key{where} can exchange KV")
    return note(
        "host",
        f"{advertised_host}, and no secret_file: only this user's engines on this machine have the key",
        "for engines on other machines, run kvferry keygen FILE, copy the file to all machines, and set "
        "secret_file",
    )


def advertised(advertised_host: str | None) -> list[Finding]:
    """Return a note if the address that an engine advertises to its peers is a host name; empty otherwise."""
    if advertised_host is None or advertised_host == "localhost" or parse_ip(advertised_host) is not None:
        return []
    # A peer resolves no other names: an API client could make it resolve any.
    return [
        note(
            "advertise_host",
            f"{advertised_host} is a host name, which other engines resolve only if their peers setting "
            "lists it",
            f"add --peers {advertised_host} to their configuration, or advertise an IP address",
        )
    ]
