"""Opening the tiers of an engine: the format of chunks, host memory, and storage."""

import logging
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from vllm.v1.kv_cache_interface import CircularBufferSpec, MambaSpec

from kvferry.common.errors import ConfigError, Unnameable
from kvferry.connector.config import ConnectorConfig, Tiers, read_tiers
from kvferry.connector.tiers.opening import canonical_forms, host_bytes, open_tiers
from kvferry.engines.vllm.compat import specs
from kvferry.engines.vllm.scheduler import cache_group
from kvferry.geometry import Group, GroupKind, Layer, RankGeometry, Region, Scale, opaque_page
from kvferry.tiers.host import settings as memory_check
from kvferry.tiers.host.settings import HostSettings
from kvferry.tiers.index import KeyTable
from kvferry.tiers.shares.tier import ShareTier
from kvferry.tools.models.layout import EngineShape, lay_out
from support.engine_info import made_up
from support.models import attention, model
from support.stores import NAMESPACE


def test_host_memory_is_a_tenth_of_available_memory_unless_configured(monkeypatch):
    monkeypatch.setattr(memory_check, "available_memory", lambda: (1000, "free on this machine"))
    assert host_bytes(Tiers(HostSettings(), ())) == 100
    assert host_bytes(Tiers(HostSettings("1kB"), ())) == 1000


def test_memory_that_cannot_be_read_is_an_error_only_if_no_capacity_is_configured(monkeypatch):
    monkeypatch.setattr(memory_check, "available_memory", lambda: None)
    assert host_bytes(Tiers(HostSettings("1MiB"), ())) == 1 << 20
    with pytest.raises(ConfigError, match="cannot read the available memory"):
        host_bytes(Tiers(HostSettings(), ()))


@pytest.mark.parametrize(
    ("spec", "way_out"),
    [
        (
            CircularBufferSpec(block_size=8, num_kv_heads=1, head_size=8, dtype=torch.float32),
            "ring",
        ),
        (
            MambaSpec(block_size=8, shapes=((2,),), dtypes=(torch.float32,)),
            "--enable-prefix-caching --mamba-cache-mode align",
        ),
    ],
    ids=["ring", "state"],
)
def test_the_error_of_an_engine_without_snapshots_says_what_to_do(spec, way_out):
    config = SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec, layer_names=["one"])])
    engine = made_up(
        groups=tuple(map(cache_group, config.kv_cache_groups)), has_rings=specs.has_rings(config)
    )
    with pytest.raises(ConfigError, match=f"{way_out}.*configure no tiers"):
        canonical_forms(ConnectorConfig(), engine, [[]])


def whole_pages(*scales: Scale) -> RankGeometry:
    page = opaque_page("NEW", 96, 64, 0, 1)
    group = Group(GroupKind.FULL, 96, 0, (Layer("layers.0", 0, 64, page, scales),))
    return RankGeometry(0, 1, 0, 1, 4, (group,), (Region(0, 256),))


def test_chunks_hold_whole_pages_of_unknown_content():
    engine = made_up(longest_request=1024)
    canonical, shares = canonical_forms(ConnectorConfig(), engine, [[whole_pages()]])
    assert canonical.chunk_tokens == 192
    assert shares == [canonical]
    with pytest.raises(ConfigError) as caught:
        canonical_forms(ConnectorConfig(chunk_tokens=100), engine, [[whole_pages()]])
    assert str(caught.value) == (
        "tiers: chunks of 100 tokens end inside this engine's blocks of 96 tokens, which must be stored "
        "whole (windows, or pages of unknown content); set chunk_tokens to 192"
    )


def test_layers_that_cannot_be_stored_are_refused_with_a_remedy():
    with pytest.raises(ConfigError) as caught:
        canonical_forms(
            ConnectorConfig(), made_up(longest_request=1024), [[whole_pages(Scale("k", (0.5, 0.25)))]]
        )
    assert str(caught.value) == (
        "tiers: layer 'layers.0': its quantised cache has a scale per head, which the canonical form cannot "
        "hold; it can be handed over to an engine of equal scales, but not be stored; choose another "
        "attention backend, layout or KV cache dtype (docs/backends.md), or configure no tiers"
    )


@pytest.mark.parametrize(("chunk", "warned"), [(256, True), (176, False), (2112, False), (None, False)])
def test_chunks_that_rarely_end_at_a_snapshot_are_a_warning_at_start(chunk, warned, caplog):
    spec = MambaSpec(block_size=1056, shapes=((2,),), dtypes=(torch.float32,), mamba_cache_mode="align")
    group = cache_group(SimpleNamespace(kv_cache_spec=spec, layer_names=["one"]))
    engine = made_up(groups=(group,), longest_request=32_768)
    with pytest.raises(ConfigError, match="every rank"):
        canonical_forms(ConnectorConfig(chunk_tokens=chunk), engine, [[]])
    said = "first end together at 8448 tokens, so nothing of a shorter prompt is loaded; leave chunk_tokens"
    assert (said in caplog.text) is warned


@pytest.mark.parametrize(
    ("machines", "why"),
    [
        ([[0, 2], [1, 3]], "no rank of the peer holds head"),
        ([[0], [1, 2, 3]], None),
        ([[0, 1], [2, 3]], None),
        ([[], [0, 1, 2, 3]], None),
    ],
)
def test_ranks_of_each_machine_must_hold_neighbouring_heads(machines, why):
    ranks = lay_out(model(attention(heads=4)), EngineShape(4, (1,), 16, "LBHNC", 100))
    divided = [[ranks[number] for number in numbers] for numbers in machines]
    if why is None:
        canonical, shares = canonical_forms(ConnectorConfig(), made_up(), divided)
        assert sum(share.groups[0].content_bytes for share in shares) == canonical.groups[0].content_bytes
        return
    with pytest.raises(ConfigError, match=f"{why}.*give each machine neighbouring"):
        canonical_forms(ConnectorConfig(), made_up(), divided)


@pytest.fixture
def opened(tmp_path):
    """Opens tiers by their settings, over folders a, b and c, and closes them."""
    for name in "abc":
        (tmp_path / name).mkdir()
    found = []

    def open_configured(*tiers, get_namespace=lambda: NAMESPACE):
        found[:] = open_tiers(read_tiers(list(tiers)).slow, get_namespace, KeyTable())
        return found

    yield open_configured
    for behind, _ in found:
        behind.close(5.0)


def test_tiers_of_one_kind_are_numbered_in_their_order(opened, tmp_path):
    found = opened(
        {"type": "file", "path": f"{tmp_path}/a", "load_weight": 0.5},
        {"type": "object", "url": f"file://{tmp_path}/c"},
        {"type": "file", "path": f"{tmp_path}/b", "write": "back"},
    )
    assert [(behind.name, weight) for behind, weight in found] == [
        ("file", 0.5),
        ("object", 1.0),
        ("file.2", 1.0),
    ]
    assert [behind.write_back for behind, _ in found] == [False, False, True]


def test_a_tier_that_cannot_be_opened_is_left_out_and_its_number_is_free(opened, tmp_path, caplog):
    with caplog.at_level(logging.ERROR):
        found = opened({"type": "file", "path": "/dev/null/none"}, {"type": "file", "path": f"{tmp_path}/a"})
    assert [behind.name for behind, _ in found] == ["file"]
    (said,) = [one.getMessage() for one in caplog.records]
    assert said.startswith("file tier: /dev/null/none")
    assert said.endswith("; this engine serves on without that tier")


def test_a_directory_under_a_second_name_is_left_out(opened, tmp_path, caplog):
    (tmp_path / "link").symlink_to("a")
    first = {"type": "file", "path": f"{tmp_path}/a"}
    found = opened(first, {**first, "path": f"{tmp_path}/link"})
    assert len(found) == 1
    assert f"{tmp_path}/link and {tmp_path}/a, which is a tier already, are one directory" in caplog.text


def test_an_engine_on_several_machines_has_no_fleet_tier(tmp_path, caplog):
    exchange = mock.Mock(lost="")
    tiers = [{"type": "fleet"}, {"type": "file", "path": str(tmp_path)}]
    found = open_tiers(read_tiers(tiers).slow, lambda: NAMESPACE, KeyTable(), exchange=exchange)
    assert [behind.name for behind, _ in found] == ["file"]
    assert isinstance(found[0][0].tier, ShareTier)
    (said,) = [one.getMessage() for one in caplog.records if one.levelno >= logging.ERROR]
    assert said.startswith("fleet tier: the ranks of this engine run on several machines")
    assert said.endswith("leave the fleet tier out; this engine serves on without that tier")
    for behind, _ in found:
        behind.close(5.0)


def test_all_tiers_share_one_table_and_one_namespace(opened, tmp_path):
    asked = []

    def named():
        asked.append(1)
        return NAMESPACE

    found = opened(
        {"type": "file", "path": f"{tmp_path}/a"},
        {"type": "file", "path": f"{tmp_path}/b"},
        get_namespace=named,
    )
    assert len(asked) == 1
    assert len({id(behind.tier.keys.table) for behind, _ in found}) == 1


def test_an_engine_whose_chunks_have_no_name_has_no_storage_tier(opened, tmp_path, caplog):
    def unnamed():
        raise Unnameable("the weights are not on a disk")

    assert opened({"type": "file", "path": f"{tmp_path}/a"}, get_namespace=unnamed) == []
    assert "the weights are not on a disk; this engine serves on without that tier" in caplog.text
