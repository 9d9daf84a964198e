"""Child connectors that a `FerryMultiConnector` is configured to run, and checks that they fit together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvferry.common.errors import ConfigError
from kvferry.engines.vllm.compat.connectors import (
    connector_class,
    supports_hybrid,
    with_connector,
    with_extra,
)
from kvferry.engines.vllm.config import check_failure_policy, read_settings
from kvferry.engines.vllm.connector import KVFerryConnector
from kvferry.engines.vllm.multi.settings import (
    HAND_OVER,
    INHERITED,
    ChildSettings,
    MultiSettings,
    check_hand_over,
    parse_multi,
)


@dataclass(frozen=True, slots=True)
class Child:
    """Class and configuration from which a `FerryMultiConnector` creates one of its children."""

    name: str
    load_weight: float
    cls: Any
    config: Any

    @property
    def is_kvferry(self) -> bool:
        return isinstance(self.cls, type) and issubclass(self.cls, KVFerryConnector)

    @property
    def can_sleep(self) -> bool:
        """True if the child can follow an engine that gives up the memory of its KV cache."""
        # vLLM asks its own connectors since 0.33.
        asked = getattr(self.cls, "supports_sleep_mode", None)
        return self.is_kvferry or (asked is not None and bool(asked(self.config.kv_transfer_config)))

    @property
    def hands_over(self) -> bool:
        if self.is_kvferry:
            return read_settings(self.config).transfers
        return self.cls.__name__ in HAND_OVER


def read_multi(vllm_config: Any) -> MultiSettings:
    """Read the settings of a `FerryMultiConnector` from vLLM's configuration, or raise ConfigError."""
    transfer = vllm_config.kv_transfer_config
    settings = parse_multi(transfer.kv_connector_extra_config)
    check_failure_policy(transfer.kv_load_failure_policy)
    return settings


def children_of(vllm_config: Any) -> tuple[Child, ...]:
    """Return the children in the order of the settings. Raise ConfigError for one that cannot be had."""
    return tuple(_child(vllm_config, one) for one in read_multi(vllm_config).children)


def _child(vllm_config: Any, settings: ChildSettings) -> Child:
    parent = vllm_config.kv_transfer_config
    inherited = {name: getattr(parent, name) for name in INHERITED}
    try:
        config = with_connector(vllm_config, {**inherited, **settings.transfer})
        cls = connector_class(config)
    except (AttributeError, ImportError, TypeError, ValueError) as error:
        why = " ".join(str(error).split())
        raise ConfigError(f"connectors: {settings.name} cannot be had: {why}") from error
    if issubclass(cls, KVFerryConnector):
        # The other children get the same blocks, and cannot tell which of them hold only the end of a window.
        config = with_extra(config, {"whole_blocks": True, "name": settings.name})
    return Child(settings.name, settings.load_weight, cls, config)


def check(children: Sequence[Child], vllm_config: Any) -> None:
    """Raise ConfigError unless children can run together in one engine."""
    if getattr(vllm_config.model_config, "enable_sleep_mode", False):
        _refuse(
            [child.name for child in children if not child.can_sleep],
            "sleep mode in this release of vLLM; leave --enable-sleep-mode out",
        )
    if not vllm_config.scheduler_config.disable_hybrid_kv_cache_manager:
        _refuse(
            [child.name for child in children if not supports_hybrid(child.config)],
            "the hybrid KV cache manager, which is on; start the engine with "
            "--disable-hybrid-kv-cache-manager",
        )
    check_hand_over([child.name for child in children if child.hands_over])


def _refuse(names: Sequence[str], feature: str) -> None:
    if names:
        them = "it" if len(names) == 1 else "them"
        raise ConfigError(f"{', '.join(names)} cannot do with {feature}, or leave {them} out of connectors")


def agreed_layout(children: Sequence[Child]) -> str | None:
    """Return the memory layout that children require for the KV cache; None if they accept any."""
    preferred: str | None = None
    layouts: dict[str, str] = {}
    for child in children:
        layout = child.cls.get_required_kvcache_layout(child.config)
        if layout is None:
            continue
        # With `auto`, it only prefers a layout, which counts if no other child requires one.
        if child.is_kvferry and read_settings(child.config).layout == "auto":
            preferred = preferred or str(layout)
        else:
            layouts[child.name] = str(layout)
    if len(set(layouts.values())) > 1:
        said = ", ".join(f"{name} wants {layout}" for name, layout in layouts.items())
        raise ConfigError(
            f"connectors need different layouts of the KV cache: {said}; an engine's cache has one, so leave "
            'one of them out, or set "layout": "auto" where it is a KVFerryConnector'
        )
    return next(iter(layouts.values()), preferred)


def agreed_count(names: Sequence[str], counts: Sequence[int | None], workers: int) -> int | None:
    """Return how many workers report the end of each transfer, from what each child states; None for all."""
    # The scheduler waits for one number of reports per transfer.
    numbers = [workers if count is None else count for count in counts]
    if len(set(numbers)) > 1:
        said = ", ".join(f"{name} has {n}" for name, n in zip(names, numbers, strict=True))
        raise ConfigError(
            f"connectors have different numbers of workers report a request: {said}; the engine waits for "
            "one number, so leave one of them out"
        )
    return next((count for count in counts if count is not None), None)
