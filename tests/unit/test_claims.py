"""What the docs say of vLLM's other connectors is what the installed vLLM does."""

from __future__ import annotations

import re
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvferry.engines.vllm.version import TESTED, minor_release, vllm_version

release = vllm_version()
if release is None or minor_release(release) != TESTED:
    pytest.skip(f"the pages speak of vLLM {TESTED}; {release} is installed", allow_module_level=True)

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
COMPARE = ROOT / "docs" / "compare.md"
NIXL = ROOT / "docs" / "migrate-nixlconnector.md"
ROW = re.compile(r"^\| `(\w+)` \| (yes|no) \| (.+) \|$", re.MULTILINE)
WITHOUT_PACKAGE = {"LMCacheMPConnector": "lmcache"}
"""Connectors that cannot be imported without a package that need not be installed."""


def of_vllm(name: str) -> Any:
    """Return an object of vLLM by the rest of its dotted name."""
    module, _, attribute = name.partition(":")
    return getattr(import_module(f"vllm.{module}"), attribute)


def connector(name: str) -> type:
    return of_vllm(
        "distributed.kv_transfer.kv_connector.factory:KVConnectorFactory"
    ).get_connector_class_by_name(name)


def has_hybrid(name: str) -> bool:
    return of_vllm("distributed.kv_transfer.kv_connector.v1:supports_hma")(connector(name))


def fields(name: str) -> set[str]:
    return set(of_vllm(name).__annotations__)


def connector_of_the_backend(backend: str) -> str:
    """Return the connector that vLLM takes for ``--kv-offloading-backend``."""
    config = SimpleNamespace(
        cache_config=SimpleNamespace(kv_offloading_size=1, kv_offloading_backend=backend),
        kv_transfer_config=None,
    )
    of_vllm("config:VllmConfig")._post_init_kv_transfer_config(config)
    return config.kv_transfer_config.kv_connector


def secondary_tiers() -> set[str]:
    return set(of_vllm("v1.kv_offload.tiering.factory:SecondaryTierFactory")._registry) - {"example"}


def takes_blocks(decode: int, prefill: int) -> bool:
    """Whether NixlConnector reads blocks of `prefill` tokens into blocks of `decode` tokens."""
    ratio = of_vllm("distributed.kv_transfer.kv_connector.utils:TransferTopology").block_size_ratio
    try:
        ratio(SimpleNamespace(block_size=decode), prefill)
    except AssertionError:
        return False
    return True


_V1 = "distributed.kv_transfer.kv_connector.v1"
ROWS: list[tuple[str, str, Callable[[], object]]] = [
    (
        "NixlConnector",
        "prefill context parallelism alone",
        lambda: {"dcp_size", "pcp_size"} <= fields(f"{_V1}.nixl.metadata:NixlAgentMetadata"),
    ),
    (
        "NixlConnector",
        "XPU and TPU",
        lambda: {"xpu", "tpu"} <= of_vllm(f"{_V1}.nixl.utils:_NIXL_SUPPORTED_DEVICE").keys(),
    ),
    (
        "NixlPushConnector",
        "push",
        lambda: of_vllm(f"{_V1}.nixl.push_scheduler:NixlPushConnectorScheduler")._TRANSFER_MODE == "push",
    ),
    (
        "OffloadingConnector",
        "prefill context parallelism alone",
        lambda: {"dcp_size", "pcp_size"} <= fields("v1.kv_offload.config:OffloadingParallelConfig"),
    ),
    (
        "OffloadingConnector",
        "`max_load_tokens`",
        lambda: "max_load_tokens" in fields(f"{_V1}.offloading.scheduler:RequestOffloadState"),
    ),
    (
        "MooncakeStoreConnector",
        "prefill context parallelism alone",
        lambda: {"dcp_rank", "pcp_rank"} <= fields(f"{_V1}.mooncake.store.data:KeyMetadata"),
    ),
]
"""(connector, words of its row in the table, what must be true of vLLM for it)."""

SENTENCES: list[tuple[Path, str, Callable[[], object]]] = [
    (
        COMPARE,
        "Its secondary tiers are `fs`, `obj`, `p2p` and `kvcr`.",
        lambda: secondary_tiers() == {"fs", "obj", "p2p", "kvcr"},
    ),
    (
        COMPARE,
        "`canonical_layout`",
        lambda: "canonical_layout" in fields("v1.kv_offload.config:OffloadingConfig"),
    ),
    (
        COMPARE,
        "vLLM picks `LMCacheMPConnector` for `--kv-offloading-backend lmcache`.",
        lambda: connector_of_the_backend("lmcache") == "LMCacheMPConnector",
    ),
    (
        COMPARE,
        "NixlConnector needs blocks of the decode engine that are a multiple of the prefill engine's",
        lambda: takes_blocks(decode=128, prefill=64) and not takes_blocks(decode=64, prefill=128),
    ),
    (
        COMPARE,
        "`store_tp_size`",
        lambda: of_vllm(f"{_V1}.mooncake.store.worker:resolve_store_tp_size")({"store_tp_size": 2}) == 2,
    ),
    (
        NIXL,
        "`VLLM_NIXL_SIDE_CHANNEL_HOST` (`localhost`)",
        lambda: of_vllm("envs:environment_variables")["VLLM_NIXL_SIDE_CHANNEL_HOST"]() == "localhost",
    ),
    (
        NIXL,
        "`VLLM_NIXL_SIDE_CHANNEL_PORT` (5600)",
        lambda: of_vllm("envs:environment_variables")["VLLM_NIXL_SIDE_CHANNEL_PORT"]() == 5600,
    ),
]
"""(page, what it says, what must be true of vLLM for it)."""


def rows() -> dict[str, tuple[str, str]]:
    """Return (hybrid, the rest) of each row of the table of connectors, by connector."""
    return {name: (hybrid, rest) for name, hybrid, rest in ROW.findall(COMPARE.read_text())}


def test_the_table_has_each_connector_that_vllm_has_for_these_peers() -> None:
    registered = of_vllm("distributed.kv_transfer.kv_connector.factory:KVConnectorFactory")._registry
    peers = re.compile("Nixl|^Offloading|LMCache|Mooncake")
    # NixlConnector is the pulling one.
    assert connector("NixlConnector") is connector("NixlPullConnector")
    assert rows().keys() == {name for name in registered if peers.search(name)} - {"NixlPullConnector"}


@pytest.mark.parametrize("name", rows())
def test_a_connector_has_the_hybrid_cache_manager_that_the_table_says(name: str) -> None:
    package = WITHOUT_PACKAGE.get(name)
    if package and find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    assert rows()[name][0] == ("yes" if has_hybrid(name) else "no"), f"correct {COMPARE.name}"


@pytest.mark.parametrize(
    ("name", "words", "is_true"), ROWS, ids=lambda part: part if isinstance(part, str) else ""
)
def test_what_a_row_says_is_true_of_vllm(name: str, words: str, is_true: Callable[[], object]) -> None:
    assert words in rows()[name][1], f"the row of {name} no longer says this: take it out of ROWS"
    assert is_true(), f"correct the row of {name} in {COMPARE.name}"


@pytest.mark.parametrize(
    ("page", "words", "is_true"), SENTENCES, ids=lambda part: part if isinstance(part, str) else ""
)
def test_what_a_page_says_is_true_of_vllm(page: Path, words: str, is_true: Callable[[], object]) -> None:
    said = " ".join(page.read_text().split())
    assert words in said, f"{page.name} no longer says this: take it out of SENTENCES"
    assert is_true(), f"correct {page.name}"


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_a_page_says_of_no_connector_wrongly_that_the_hybrid_cache_manager_is_off(page: Path) -> None:
    with_hybrid = {name for name, (hybrid, _) in rows().items() if hybrid == "yes"}
    for paragraph in re.split(r"\n\s*\n|\n(?=[|-])", page.read_text()):
        for sentence in re.split(r"(?<=[.:;]) ", " ".join(paragraph.split())):
            if "hybrid cache manager" in sentence and re.search(r"\boff\b", sentence):
                named = re.findall(r"`(\w+Connector\w*)`", sentence)
                wrong = [name for name in named if name in with_hybrid]
                assert not wrong, f"{page.name}: {sentence}"
                assert named or not re.search("LMCache|Mooncake|Nixl|Offloading", sentence), (
                    f"{page.name}: name the class of the connector in: {sentence}"
                )
