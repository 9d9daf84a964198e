"""State pages of every mamba type, at any number of ranks: all of it, once, where vLLM puts it."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, replace
from math import prod
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from kvferry.common.errors import Incompatible
from kvferry.engines.vllm.state import FORMATS, Rank, StateFormat, page_of_state
from kvferry.geometry import PageFormat
from kvferry.planning.cell_copy import plan_page_copy
from kvferry.planning.descriptors import concatenate


@dataclass(frozen=True)
class Spec:
    """As vLLM's `MambaSpec`, as far as it is read."""

    mamba_type: Any
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...]
    num_speculative_blocks: int = 0
    tp_replicated: bool = False

    @property
    def state_content_size_bytes(self) -> int:
        return sum(prod(s) * d.itemsize for s, d in zip(self.shapes, self.dtypes, strict=True))


class Parameter(torch.nn.Parameter):
    """A weight with a loader, as vLLM hangs it on."""


def weight(shape: tuple[int, ...], loader: Any) -> Any:
    made = Parameter(torch.zeros(shape), requires_grad=False)
    made.weight_loader = loader
    return made


def share(rank: int, ranks: int, *sizes: int, copied: tuple[int, ...] = ()) -> Any:
    """A loader that takes this rank's share of every segment, and all of the copied ones."""

    def load(param: Any, loaded: torch.Tensor) -> None:
        parts = []
        for n, part in enumerate(loaded.split(list(sizes) or loaded.shape[0])):
            held = len(part) // ranks
            parts.append(part if n in copied else part[rank * held : (rank + 1) * held])
        param.data.copy_(torch.cat(parts))

    return load


def in_parts(rank: int, ranks: int, *sizes: int) -> Any:
    """A loader that is given one segment at a time."""

    def load(param: Any, loaded: torch.Tensor, loaded_shard_id: int) -> None:
        held = [size // ranks for size in sizes]
        first, count = sum(held[:loaded_shard_id]), held[loaded_shard_id]
        param.data[first : first + count].copy_(loaded[rank * count : (rank + 1) * count])

    return load


def convolution(rank: int, ranks: int, *sizes: int, kernel: int, copied: tuple[int, ...] = ()) -> Any:
    held = sum(size if n in copied else size // ranks for n, size in enumerate(sizes))
    return SimpleNamespace(weight=weight((held, 1, kernel), share(rank, ranks, *sizes, copied=copied)))


def per_head(heads: int, rank: int, ranks: int, rows: int = 1) -> Any:
    return weight((heads // ranks * rows,), share(rank, ranks))


def mamba1(rank: int, ranks: int) -> Any:
    return SimpleNamespace(
        intermediate_size=32, ssm_state_size=16, conv_kernel_size=4,
        conv1d=convolution(rank, ranks, 32, kernel=4), D=per_head(32, rank, ranks),
    )  # fmt: skip


def mamba2(rank: int, ranks: int, groups: int = 4) -> Any:
    copied = (1, 2) if groups == 1 else ()
    return SimpleNamespace(
        num_heads=8, head_dim=4, ssm_state_size=16, conv_kernel_size=4, norm=SimpleNamespace(n_groups=groups),
        conv1d=convolution(rank, ranks, 32, groups * 16, groups * 16, kernel=4, copied=copied),
        D=per_head(8, rank, ranks),
    )  # fmt: skip


def mamba2_of_one_group(rank: int, ranks: int) -> Any:
    return mamba2(rank, ranks, groups=1)


def gated_delta_net(rank: int, ranks: int) -> Any:
    return SimpleNamespace(
        num_k_heads=4, num_v_heads=8, head_k_dim=6, head_v_dim=5, conv_kernel_size=4,
        conv1d=convolution(rank, ranks, 24, 24, 40, kernel=4), dt_bias=per_head(8, rank, ranks),
    )  # fmt: skip


def kimi_delta(rank: int, ranks: int) -> Any:
    return SimpleNamespace(
        num_heads=4, head_dim=6, conv_size=4, dt_bias=per_head(4, rank, ranks, rows=6),
        conv1d=SimpleNamespace(weight=weight((72 // ranks, 1, 4), in_parts(rank, ranks, 24, 24, 24))),
    )  # fmt: skip


def lightning(rank: int, ranks: int) -> Any:
    slopes = torch.linspace(0.1, 1.0, 8)[:, None]
    held = 8 // ranks
    return SimpleNamespace(
        num_heads=8, head_dim=4, slope_rate=slopes, tp_slope=slopes[rank * held : (rank + 1) * held]
    )


def short_conv(rank: int, ranks: int) -> Any:
    return SimpleNamespace(conv_dim=24, L_cache=3, conv=convolution(rank, ranks, 24, kernel=3))


LAYERS = {
    "mamba1": ("MAMBA1", mamba1),
    "mamba2": ("MAMBA2", mamba2),
    "mamba2 of one group": ("MAMBA2", mamba2_of_one_group),
    "gated delta net": ("GDN_ATTN", gated_delta_net),
    "kimi delta": ("GDN_ATTN", kimi_delta),
    "lightning": ("LINEAR", lightning),
    "short conv": ("SHORT_CONV", short_conv),
}


def shapes_of_vllm(name: str, ranks: int, drafts: int) -> tuple[tuple[int, ...], ...]:
    """By the formulas of `MambaStateShapeCalculator`, window first, written out again."""
    groups = ranks if name == "mamba2 of one group" else 4
    return {
        "mamba1": ((3, 32 // ranks), (32 // ranks, 16)),
        "mamba2": ((3 + drafts, (32 + 2 * groups * 16) // ranks), (8 // ranks, 4, 16)),
        "gated delta net": ((3 + drafts, (6 * 4 * 2 + 5 * 8) // ranks), (8 // ranks, 5, 6)),
        "kimi delta": ((3 + drafts, 72 // ranks), (4 // ranks, 6, 6)),
        "lightning": ((8 // ranks, 4, 4),),
        "short conv": ((2 + drafts, 24 // ranks),),
    }[name.removesuffix(" of one group")]


def page(
    name: str, rank: int, ranks: int, channels_first: bool = False, drafts: int = 0, **changed: Any
) -> PageFormat:
    """What rank `rank` of `ranks` says of its page."""
    kind, make = LAYERS[name]
    shapes = shapes_of_vllm(name, ranks, drafts)
    if channels_first and name != "lightning":
        shapes = (shapes[0][::-1], *shapes[1:])
    dtypes = (torch.bfloat16, torch.float32)[-len(shapes) :]
    spec = Spec(SimpleNamespace(name=kind), shapes, dtypes, drafts)
    where = Rank(rank, ranks, channels_first)
    return page_of_state(make(rank, ranks), "layer 0", replace(spec, **changed), "cpu", where)


def is_opaque(found: PageFormat) -> bool:
    return [axis.name for field in found.fields for axis in field.axes] == ["shard"]


def bytes_of(found: PageFormat) -> np.ndarray:
    """Every byte that a field covers, as often as fields do."""
    covered = []
    for field in found.fields:
        offsets = np.array([field.offset], np.int64)
        for axis in field.axes:
            offsets = (offsets[:, None] + axis.offsets()).reshape(-1)
        covered.append((offsets[:, None] + np.arange(field.item_bytes)).reshape(-1))
    return np.sort(np.concatenate(covered))


every_type = pytest.mark.parametrize("name", LAYERS)
either_order = pytest.mark.parametrize("channels_first", [False, True], ids=["SD", "DS"])
sizes = pytest.mark.parametrize("ranks", [1, 2, 4])


@every_type
@either_order
@sizes
def test_fields_are_all_of_a_page_once(name, channels_first, ranks):
    for rank in range(ranks):
        found = page(name, rank, ranks, channels_first)
        assert not is_opaque(found)
        assert np.array_equal(bytes_of(found), np.arange(found.page_bytes))
        assert found.block_tokens == 0


@every_type
@either_order
def test_elements_lie_where_vllms_views_of_a_page_have_them(name, channels_first):
    shapes = shapes_of_vllm(name, 2, 0)
    found = page(name, 1, 2, channels_first)
    begin = 0
    if name != "lightning":
        window, channels = shapes[0]
        lie = np.arange(window * channels).reshape(shapes[0][::-1] if channels_first else shapes[0])
        expected = (lie if channels_first else lie.T) * found.fields[0].item_bytes
        segments = [field for field in found.fields if field.name != "ssm"]
        offsets = [f.offset + np.add.outer(f.axes[0].offsets(), f.axes[1].offsets()) for f in segments]
        assert np.array_equal(np.concatenate(offsets), expected)
        begin = lie.size * found.fields[0].item_bytes
    for field in (field for field in found.fields if field.name == "ssm"):
        offsets = np.array([field.offset], np.int64)
        for axis in field.axes:
            offsets = np.add.outer(offsets, axis.offsets())
        assert np.array_equal(offsets[0], begin + np.arange(prod(shapes[-1])).reshape(shapes[-1]) * 4)


@every_type
@sizes
def test_ranks_hold_every_element_once_or_all_of_them_all(name, ranks):
    pages = [page(name, rank, ranks) for rank in range(ranks)]
    whole = {field.name: field for field in page(name, 0, 1).fields}
    for number, field in enumerate(pages[0].fields):
        held = [p.fields[number].axes[0] for p in pages]
        total = whole[field.name].axes[0].count
        assert {axis.total for axis in held} == {total}
        if held[0].count == total:
            assert all((axis.start, axis.stop) == (0, total) for axis in held)
        else:
            stops = [axis.stop for axis in held]
            assert [axis.start for axis in held] == [0, *stops[:-1]]
            assert stops[-1] == total


@sizes
def test_only_a_single_group_is_copied(ranks):
    copied = [f.name for f in page("mamba2 of one group", 0, ranks).fields if not f.held]
    assert copied == (["conv.b", "conv.c"] if ranks > 1 else ["conv.x", "conv.b", "conv.c", "ssm"])


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("mamba1", ["conv.x", "ssm"]),
        ("mamba2", ["conv.x", "conv.b", "conv.c", "ssm"]),
        ("gated delta net", ["conv.q", "conv.k", "conv.v", "ssm"]),
        ("kimi delta", ["conv.q", "conv.k", "conv.v", "ssm"]),
        ("lightning", ["ssm"]),
        ("short conv", ["conv"]),
    ],
)
def test_fields_have_the_names_of_their_projections(name, fields):
    assert [field.name for field in page(name, 0, 2).fields] == fields


@every_type
@pytest.mark.parametrize(("src_ranks", "dst_ranks"), [(1, 2), (2, 1), (4, 2), (2, 4), (2, 2)])
@pytest.mark.parametrize("orders", [(False, False), (True, False), (False, True)])
def test_state_moves_between_any_ranks_and_orders(name, src_ranks, dst_ranks, orders):
    """Fill the source's ranks with what each element is, move, and look at the destination's."""
    sources = [page(name, rank, src_ranks, orders[0]) for rank in range(src_ranks)]
    pages = [filled(source) for source in sources]
    for rank in range(dst_ranks):
        target = page(name, rank, dst_ranks, orders[1])
        moved = np.zeros(target.page_bytes, np.uint8)
        for source, memory in zip(sources, pages, strict=True):
            descriptors = concatenate(
                [cell_copy.descriptors for cell_copy in plan_page_copy(source, target).cell_copies]
            )
            for src, dst, length in zip(descriptors.src, descriptors.dst, descriptors.length, strict=True):
                moved[dst : dst + length] = memory[src : src + length]
        assert np.array_equal(moved, filled(target))


@every_type
@either_order
def test_between_equal_ranks_a_page_moves_as_one_stretch(name, channels_first):
    one, other = (page(name, 1, 2, channels_first) for _ in range(2))
    (cell_copy,) = plan_page_copy(one, other).cell_copies
    assert cell_copy.descriptors.length.tolist() == [one.page_bytes]


@pytest.mark.parametrize("name", ["mamba2", "gated delta net"])
def test_channels_first_halves_move_as_one_stretch_per_field(name):
    (cell_copy,) = plan_page_copy(
        page(name, 0, 1, channels_first=True), page(name, 0, 2, channels_first=True)
    ).cell_copies
    assert len(cell_copy.descriptors) == 4


def filled(found: PageFormat) -> np.ndarray:
    """A page whose every element is a digest of the name of its field and of its global coordinates."""
    memory = np.zeros(found.page_bytes, np.uint8)
    for number, field in enumerate(found.fields, 1):
        offsets, code = np.array([field.offset], np.int64), np.array([number * 7919], np.int64)
        for axis in field.axes:
            offsets = (offsets[:, None] + axis.offsets()).reshape(-1)
            code = (code[:, None] * 131 + np.arange(axis.start, axis.stop)).reshape(-1)
        for byte in range(field.item_bytes):
            memory[offsets + byte] = code >> 8 * byte & 255
    return memory


@pytest.mark.parametrize("name", [name for name in LAYERS if name not in ("mamba1", "lightning")])
@either_order
def test_columns_for_drafts_are_no_part_of_a_field(name, channels_first):
    with_drafts, without = (page(name, 1, 2, channels_first, drafts) for drafts in (2, 0))
    assert with_drafts.page_bytes > without.page_bytes
    assert with_drafts.content_bytes == without.content_bytes
    window = with_drafts.fields[0].axis("width")
    if with_drafts.fields[-1].name == "ssm":
        assert with_drafts.fields[-1].offset == prod(shapes_of_vllm(name, 2, 2)[0]) * 2
    # The first columns of the window, where a step that computes a prompt leaves it.
    assert window.start == 0
    assert window.count == without.fields[0].axis("width").count
    plan_page_copy(without, with_drafts)


@every_type
def test_a_state_that_every_rank_has_is_copied(name):
    pages = [page(name, rank, 2, tp_replicated=True) for rank in range(2)]
    assert all(is_opaque(found) and not found.fields[0].held for found in pages)


def test_dtypes_are_part_of_the_content():
    half = page("gated delta net", 0, 1, dtypes=(torch.float16, torch.float32))
    assert half.content != page("gated delta net", 0, 1).content


# -- what is not explained, or not confirmed ----------------------------------------------------------------


@every_type
def test_shapes_that_the_dimensions_do_not_make_are_opaque(name, caplog):
    shapes = shapes_of_vllm(name, 2, 0)
    last = shapes[-1]
    odd = (*shapes[:-1], (*last[:-1], last[-1] + 1))
    found = page(name, 1, 2, shapes=odd)
    assert is_opaque(found)
    assert found.fields[0].held == (("shard", 1, 2),)
    assert "the engine declares" in caplog.text


def test_further_states_are_opaque(caplog):
    shapes = shapes_of_vllm("mamba2", 2, 0)
    ring = page("mamba2", 0, 2, shapes=(*shapes, (4, 8, 4)), dtypes=(torch.bfloat16, *[torch.float32] * 2))
    assert is_opaque(ring)


def test_a_type_that_is_not_known_is_opaque(caplog):
    assert is_opaque(page("mamba2", 0, 2, mamba_type=SimpleNamespace(name="CUSTOM")))
    assert "its mamba type is not known" in caplog.text


def test_groups_that_cannot_be_shared_out_are_opaque(monkeypatch, caplog):
    monkeypatch.setitem(LAYERS, "mamba2", ("MAMBA2", lambda rank, ranks: mamba2(rank, ranks, groups=2)))
    assert is_opaque(page("mamba2", 0, 4))
    assert "conv.b, conv.c cannot be shared out evenly over 4 ranks" in caplog.text


def test_opaque_pages_of_the_two_orders_do_not_mix():
    odd = {"mamba_type": SimpleNamespace(name="CUSTOM")}
    with pytest.raises(Incompatible):
        plan_page_copy(page("short conv", 0, 1, **odd), page("short conv", 0, 1, channels_first=True, **odd))


@every_type
def test_a_loader_that_gives_another_ranks_share_disproves_the_fields(name, monkeypatch, caplog):
    kind, make = LAYERS[name]
    monkeypatch.setitem(LAYERS, name, (kind, lambda rank, ranks: make(1 - rank, ranks)))
    assert is_opaque(page(name, 0, 2))
    assert "are not [0, " in caplog.text


def test_channels_that_are_halved_across_segments_disprove_the_fields(monkeypatch, caplog):
    def halved(rank, ranks):
        layer = mamba2(rank, ranks)
        layer.conv1d.weight.weight_loader = share(rank, ranks)
        return layer

    monkeypatch.setitem(LAYERS, "mamba2", ("MAMBA2", halved))
    assert is_opaque(page("mamba2", 0, 2))
    assert "channels of conv.x are not" not in caplog.text
    assert "channels of conv.b are not [0, 32) of 64" in caplog.text


def test_heads_dealt_out_in_turn_disprove_the_fields(monkeypatch, caplog):
    def dealt(rank, ranks):
        layer = mamba2(rank, ranks)
        layer.D.weight_loader = lambda param, loaded: param.data.copy_(loaded[rank::ranks])
        return layer

    monkeypatch.setitem(LAYERS, "mamba2", ("MAMBA2", dealt))
    assert is_opaque(page("mamba2", 1, 2))
    assert "heads are not [4, 8) of 8" in caplog.text


def test_a_layer_that_cannot_be_asked_is_opaque(monkeypatch, caplog):
    def silent(rank, ranks):
        layer = short_conv(rank, ranks)
        del layer.conv.weight.weight_loader
        return layer

    monkeypatch.setitem(LAYERS, "short conv", ("SHORT_CONV", silent))
    assert is_opaque(page("short conv", 0, 2))
    assert "could not be asked" in caplog.text


def test_asking_changes_no_weight():
    layer = kimi_delta(1, 2)
    before = layer.conv1d.weight.clone()
    spec = Spec(
        SimpleNamespace(name="GDN_ATTN"), shapes_of_vllm("kimi delta", 2, 0), (torch.float32, torch.float32)
    )
    assert not is_opaque(page_of_state(layer, "layer 0", spec, "cpu", Rank(1, 2, channels_first=False)))
    assert torch.equal(layer.conv1d.weight, before)


def test_every_format_reads_a_layer_and_nothing_else():
    for read in FORMATS.values():
        assert list(inspect.signature(read).parameters) == ["layer"]
        assert inspect.signature(read).return_annotation in (StateFormat, "StateFormat")
