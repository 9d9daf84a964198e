"""Opening the tiers of an engine."""

from types import SimpleNamespace

import pytest
import torch
from vllm.v1.kv_cache_interface import CircularBufferSpec, MambaSpec

from kvferry.common.errors import ConfigError
from kvferry.connector.config import ConnectorConfig, Tiers
from kvferry.connector.tiers.tiering import _canonical, _host_bytes
from kvferry.engines.vllm.compat import specs
from kvferry.engines.vllm.scheduler import cache_group
from kvferry.geometry import Group, GroupKind, Layer, RankGeometry, Region, Scale, opaque_page
from kvferry.tiers.host import settings as memory_check
from kvferry.tiers.host.settings import HostSettings
from kvferry.tools.models.layout import EngineShape, lay_out
from support.engine_info import made_up
from support.models import attention, model


def test_host_memory_is_a_tenth_of_available_memory_unless_configured(monkeypatch):
    monkeypatch.setattr(memory_check, "available_memory", lambda: (1000, "free on this machine"))
    assert _host_bytes(Tiers(HostSettings(), ())) == 100
    assert _host_bytes(Tiers(HostSettings("1kB"), ())) == 1000


def test_memory_that_cannot_be_read_is_an_error_only_if_no_capacity_is_configured(monkeypatch):
    monkeypatch.setattr(memory_check, "available_memory", lambda: None)
    assert _host_bytes(Tiers(HostSettings("1MiB"), ())) == 1 << 20
    with pytest.raises(ConfigError, match="cannot read the available memory"):
        _host_bytes(Tiers(HostSettings(), ()))


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
        _canonical(ConnectorConfig(), engine, [[]])


def whole_pages(*scales: Scale) -> RankGeometry:
    page = opaque_page("NEW", 96, 64, 0, 1)
    group = Group(GroupKind.FULL, 96, 0, (Layer("layers.0", 0, 64, page, scales),))
    return RankGeometry(0, 1, 0, 1, 4, (group,), (Region(0, 256),))


def test_chunks_hold_whole_pages_of_unknown_content():
    engine = made_up(longest_request=1024)
    canonical, shares = _canonical(ConnectorConfig(), engine, [[whole_pages()]])
    assert canonical.chunk_tokens == 192
    assert shares == [canonical]
    with pytest.raises(ConfigError) as caught:
        _canonical(ConnectorConfig(chunk_tokens=100), engine, [[whole_pages()]])
    assert str(caught.value) == (
        "tiers: chunks of 100 tokens end inside this engine's blocks of 96 tokens, which must be stored "
        "whole (windows, or pages of unknown content); set chunk_tokens to 192"
    )


def test_layers_that_cannot_be_stored_are_refused_with_a_remedy():
    with pytest.raises(ConfigError) as caught:
        _canonical(ConnectorConfig(), made_up(longest_request=1024), [[whole_pages(Scale("k", (0.5, 0.25)))]])
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
        _canonical(ConnectorConfig(chunk_tokens=chunk), engine, [[]])
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
        canonical, shares = _canonical(ConnectorConfig(), made_up(), divided)
        assert sum(share.groups[0].content_bytes for share in shares) == canonical.groups[0].content_bytes
        return
    with pytest.raises(ConfigError, match=f"{why}.*give each machine neighbouring"):
        _canonical(ConnectorConfig(), made_up(), divided)
