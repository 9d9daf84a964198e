"""The secret key of an engine, and the peers that its configuration allows."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from kvferry.connector.config import ConnectorConfig
from kvferry.connector.messages import WorkerInfo
from kvferry.errors import ConfigError
from kvferry.tiers.paths import boot_id
from kvferry.transport.address import is_loopback
from kvferry.transport.allowed_peers import AllowedPeers, parse_allowed_peers
from kvferry.transport.key_file import key_location, read_keys
from kvferry.transport.security import Keys

logger = logging.getLogger(__name__)


def scheduler_keys(config: ConnectorConfig) -> Keys | None:
    """Return the secret keys that protect the control channels between this engine and other engines.

    Return None if the engine exchanges no KV and has no admin API, whose token derives from the keys. Log the
    location and the fingerprint of the keys. Log a warning if engines on other machines may connect but the
    setting ``secret_file`` is not set: such engines are refused until the user gives them the same secret.

    Args:
        config: settings of the connector.

    Raises:
        ConfigError: the key file cannot be read, or a missing one cannot be created.
    """
    if not config.transfers and config.admin is None:
        return None
    keys, place = read_keys(config.secret_file), key_location(config.secret_file)
    logger.info("channels between engines use %s (fingerprint %s)", place, keys.fingerprint)
    if config.transfers and not place.configured and not is_loopback(config.host):
        logger.warning(
            "host is %s and secret_file is not set, so only this user's engines on this machine have "
            "the key: others are refused until they have it too; copy %s to their machines, or make a file "
            "with kvferry keygen FILE, and set secret_file everywhere",
            config.host, place.path,
        )  # fmt: skip
    return keys


def peers_allowed(config: ConnectorConfig) -> AllowedPeers:
    """Return the machines whose engines may exchange KV with this engine.

    Args:
        config: settings of the connector, with the list of these machines in ``peers``.

    Raises:
        ConfigError: the setting ``peers`` has a malformed entry, no entry, or too many entries.
    """
    return parse_allowed_peers(config.peers, config.host, config.advertise_host)


def check_rank_keys(keys: Keys, workers: Iterable[WorkerInfo]) -> None:
    """Check that all ranks of the engine have the same key as its scheduler.

    Args:
        keys: secret keys of the scheduler.
        workers: descriptions of all workers, each with the fingerprint of the worker's key.

    Raises:
        ConfigError: the key of a rank differs from the scheduler's. This happens if the rank runs on another
            machine and that machine has a key of its own.
    """
    for worker in workers:
        if worker.key not in (None, keys.fingerprint):
            geometry = worker.geometry
            raise ConfigError(
                f"rank TP{geometry.tp_rank} PP{geometry.pp_rank} has a key with fingerprint {worker.key}, "
                f"the engine's scheduler one with {keys.fingerprint}: its machine has a key of its own; set "
                "secret_file to the same secret on all machines of the engine (kvferry keygen FILE makes one)"
            )


def check_one_machine(workers: Iterable[WorkerInfo]) -> None:
    """Check that all ranks of an engine with tiers run on the machine of its scheduler.

    Args:
        workers: descriptions of all workers.

    Raises:
        ConfigError: a rank runs on another machine, where it cannot use the scheduler's host memory.
    """
    for worker in workers:
        if worker.machine != boot_id():
            geometry = worker.geometry
            raise ConfigError(
                f"rank TP{geometry.tp_rank} PP{geometry.pp_rank} runs on another machine than the engine's "
                "scheduler, but the ranks of an engine with tiers share host memory; leave tiers out, or "
                "start the engine on one machine"
            )
