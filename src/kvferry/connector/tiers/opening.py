"""Opens the storage tiers of an engine."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence

from kvferry.cache.tier_queue import TierQueue
from kvferry.cache.writing import SlowTier
from kvferry.errors import ConfigError, Unnameable
from kvferry.keys.namespace import Namespace
from kvferry.tiers.index.key_table import KeyTable
from kvferry.tiers.names import tier_name
from kvferry.tiers.storage_settings import StorageSettings

logger = logging.getLogger(__name__)


def open_tiers(
    tiers: Sequence[StorageSettings], get_namespace: Callable[[], Namespace], table: KeyTable
) -> list[tuple[SlowTier, float]]:
    """Open the storage tiers. Log an error for each tier that cannot be opened, and leave it out.

    Args:
        tiers: settings of the tiers, the fastest first.
        get_namespace: returns the namespace of the keys. Called only if there is a tier, and not again after
            it has succeeded.
        table: table of chunk keys that all tiers share.

    Returns:
        (tier, weight) for each opened tier, the fastest first. The weight is the setting ``load_weight``.
    """
    found: list[tuple[SlowTier, float]] = []
    kinds = Counter[str]()
    namespace = None
    for number, settings in enumerate(tiers):
        try:
            namespace = namespace or get_namespace()
            tier = settings.open(namespace, table, tiers[:number])
        except (ConfigError, Unnameable) as error:
            logger.error("%s; this engine serves on without that tier", error)  # noqa: TRY400 - said in full
            continue
        queue = TierQueue(tier, tier_name(settings.kind, kinds[settings.kind]))
        kinds[settings.kind] += 1
        found.append((SlowTier(queue, settings.write == "back"), settings.load_weight))
    return found
