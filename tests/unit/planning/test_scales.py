"""Codes are exchanged only between layers whose scales are the same."""

from dataclasses import replace

import pytest

from kvferry.common.errors import GeometryError, Incompatible
from kvferry.geometry import GroupKind, Layer, RankGeometry, Scale
from kvferry.geometry.canonical import canonical_form_of, chunk_pool
from kvferry.planning.template import build_templates
from kvferry.tools.models.layout import EngineShape, lay_out
from kvferry.tools.models.store import LayerCache, ModelCache, StoredField

FIELDS = (*(StoredField(name, 1, 4, (("content", 8),)) for name in ("k", "v")), StoredField("k.scale", 4, 4))
MODEL = ModelCache("fp8", (LayerCache(GroupKind.FULL, 0, FIELDS),) * 2)


def engine(tp: int, scales: dict[int, tuple[Scale, ...]]) -> list[RankGeometry]:
    """Ranks whose layers have scales, by the layer's number; one factor, or one per head of all ranks."""

    def of(rank: RankGeometry, number: int, layer: Layer) -> Layer:
        held = 4 // tp
        first = rank.tp_rank * held
        own = tuple(
            replace(s, factors=s.factors[first : first + held]) if len(s.factors) > 1 else s
            for s in scales.get(number, ())
        )
        return replace(layer, scales=own)

    ranks = lay_out(MODEL, EngineShape(tp, (2,), 16, "LBHNC", 8))
    return [
        replace(
            rank,
            groups=tuple(
                replace(group, layers=tuple(of(rank, n, layer) for n, layer in enumerate(group.layers)))
                for group in rank.groups
            ),
        )
        for rank in ranks
    ]


ONE = {0: (Scale("k", (0.5,)),)}
PER_HEAD = {0: (Scale("k", (0.5, 0.25, 2.0, 1.0)),)}


@pytest.mark.parametrize("scales", [{}, ONE, PER_HEAD, {1: (Scale("v", (0.03,)), Scale("k", (3.0,)))}])
def test_equal_scales_pass_whatever_the_parallel_size(scales):
    for there, here in ((1, 2), (2, 1), (2, 2)):
        for rank in engine(here, scales):
            templates = build_templates(engine(there, scales), rank)
            assert any(template.routes for template in templates)


@pytest.mark.parametrize(
    ("there", "here"),
    [
        ({}, ONE),
        (ONE, {}),
        (ONE, {0: (Scale("k", (0.5000001,)),)}),
        (ONE, {0: (Scale("v", (0.5,)),)}),
        (PER_HEAD, {0: (Scale("k", (0.5, 0.25, 2.0, 1.5)),)}),
        (ONE, PER_HEAD),
    ],
)
def test_other_scales_are_refused_by_layer(there, here):
    said = []
    for rank in engine(2, here):
        try:
            build_templates(engine(1, there), rank)
        except Incompatible as refused:
            said += refused.differences
    assert said
    assert all(one.startswith("layer 'layers.0': its quantised cache has other scales there") for one in said)


@pytest.mark.parametrize("number", [0, 1])
def test_peer_is_refused_if_one_of_its_ranks_has_other_scales(number):
    other = {0: (Scale("k", (0.5, 0.25, 2.0, 1.5) if number else (0.75, 0.25, 2.0, 1.0)),)}
    ranks = engine(2, PER_HEAD)
    ranks[number] = engine(2, other)[number]
    with pytest.raises(Incompatible, match="other scales there"):
        build_templates(ranks, engine(1, PER_HEAD)[0])


def test_scale_of_one_equals_no_scale():
    for there, here in ((1.0, None), (None, 1.0), (1.0, 1.0)):
        sides = [{} if each is None else {0: (Scale("k", (each,)),)} for each in (there, here)]
        assert build_templates(engine(1, sides[0]), engine(2, sides[1])[1])


def test_scales_are_part_of_the_chunk_content():
    plain, scaled = (canonical_form_of(engine(2, scales), 32) for scales in ({}, ONE))
    assert plain.content != scaled.content
    more = set(scaled.describe()) - set(plain.describe())
    assert len(more) == 3
    assert all(line.endswith("scaled 'k':0.5") for line in more)
    assert scaled == canonical_form_of(engine(1, ONE), 32)


def test_chunks_load_only_under_their_own_scales():
    ranks = engine(2, ONE)
    pool = chunk_pool(canonical_form_of(ranks, 32), 0, 1 << 30, 4)
    assert build_templates(ranks, pool)
    assert build_templates([pool], ranks[1])
    with pytest.raises(Incompatible, match="other scales"):
        build_templates([pool], engine(2, {})[1])


def test_a_scale_per_head_has_no_canonical_form():
    with pytest.raises(GeometryError, match=r"a scale per head.* can be handed over .* not be stored"):
        canonical_form_of(engine(2, PER_HEAD), 32)
