"""Check an engine's settings against this machine, with the functions that the engine uses at its start."""

from __future__ import annotations

from kvferry.connector.config import ConnectorConfig
from kvferry.connector.tier_config import read_tiers
from kvferry.observe.line_file import check_line_file
from kvferry.tiers.host.memory_check import check_available
from kvferry.tiers.sizes import parse_size
from kvferry.transport.costs_file import load_costs
from kvferry.transport.key_file import existing_keys


def check_machine(config: ConnectorConfig) -> None:
    """Check that an engine with these settings can use the files, directories and memory that they name.

    Nothing is left behind: the key of this machine and the default directory of the file tier are not made.
    Object storage is not contacted.

    Args:
        config: settings of the connector.

    Raises:
        ConfigError: a file or directory is missing or cannot be used, or the machine has too little memory.
    """
    load_costs(config.costs)
    if config.transfers:
        existing_keys(config.secret_file)
        if config.transfer_log is not None:
            check_line_file("transfer_log", config.transfer_log)
    if config.record is not None:
        check_line_file("record", config.record)
    tiers = read_tiers(config.tiers)
    if tiers is None:
        return
    if tiers.host.capacity is not None:
        check_available(parse_size(tiers.host.capacity))
    for slow in tiers.slow:
        slow.check_storage()
