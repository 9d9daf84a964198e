import numpy as np

from kvferry.planning.image import ALIGNMENT, fetched, gathered
from kvferry.planning.nest import Loop, Nest
from kvferry.planning.plane import ONE_CELL, Plane, PoolNests


def plane(*nests: Nest) -> list[Plane]:
    """What moves between blocks that are one cell."""
    return [Plane(ONE_CELL, ONE_CELL, nests)]


HALF_OF_THE_HEADS = Nest(512, 0, 512, (Loop(16, 1024, 512),))
"""16 tokens of 2 heads of 512 bytes, the second of them wanted."""


def test_what_is_gathered_is_dense_in_the_destinations_order():
    image = gathered(plane(HALF_OF_THE_HEADS))
    pieces = image.stretches[0].pieces
    assert (pieces.src.tolist(), pieces.dst.tolist(), pieces.length.tolist()) == ([0], [0], [16 * 512])
    assert image.stride == 16 * 512


def test_what_others_supply_is_left_out_of_a_gathered_image():
    every_other = Nest(0, 1000, 64, (Loop(4, 64, 128),))
    image = gathered(plane(every_other))
    pieces = image.stretches[0].pieces
    assert pieces.src.tolist() == [0, 64, 128, 192]
    assert pieces.dst.tolist() == [1000, 1128, 1256, 1384]


def test_gaps_are_read_along_up_to_their_limit():
    assert fetched(plane(HALF_OF_THE_HEADS), 511).stretches[0].pieces.length.tolist() == [512] * 16
    whole = fetched(plane(HALF_OF_THE_HEADS), 512).stretches[0].pieces
    assert (whole.src.tolist(), whole.length.tolist()) == ([512], [15 * 1024 + 512])


def test_nothing_is_read_across_the_beginning_of_a_region():
    nests = [Nest(0, 0, 64), Nest(64, 64, 64)]
    assert len(fetched(plane(*nests), 0).stretches[0].pieces) == 1
    assert fetched(plane(*nests), 1000, cuts=[0, 64]).stretches[0].pieces.src.tolist() == [0, 64]


def test_images_begin_at_whole_words():
    image = gathered(plane(Nest(0, 0, 5)))
    assert image.stride == ALIGNMENT
    assert image.bytes == 5


def test_an_order_that_loops_cannot_follow_is_taken_apart():
    # Destination: a run of the other nest lies between the first two of this one only.
    loop = Nest(0, 0, 8, (Loop(3, 8, 20),))
    other = Nest(500, 8, 4)
    image = gathered(plane(loop, other))
    placed = sorted((nest.dst, nest.src, nest.run) for nest in image.nests[0].nests for _ in range(nest.rows))
    assert len(image.nests[0].nests) > 2
    assert sum(nest.bytes for nest in image.nests[0].nests) == 28
    assert [dst for dst, _, _ in placed][:2] == [0, 8]
    assert image.stretches[0].pieces.length.tolist() == [12, 8, 8]


def test_the_longest_stretch_is_that_of_any_plane():
    short = Plane((0, 8), ONE_CELL, (Nest(0, 0, 4),))
    long = Plane((0, 16), ONE_CELL, (Nest(100, 100, 12),))
    assert [fetched(planes, 0).longest for planes in ([short, long], [long, short])] == [12, 12]


def test_more_stretches_than_are_worth_packing_are_no_image():
    scattered = Nest(0, 0, 1, (Loop(1 << 9, 3, 1 << 10), Loop(1 << 9, 3 << 9, 2)))
    assert gathered(plane(scattered)) is None


def test_loops_of_an_image_keep_inside_of_it():
    image = gathered(plane(Nest(0, 0, 8, (Loop(4, 100, 1000), Loop(3, 8, 16)))))
    for nest in image.nests[0].nests:
        pieces = nest.pieces()
        assert pieces.dst.min() >= 0
        assert (pieces.dst + pieces.length).max() <= image.bytes
        assert len(np.unique(pieces.dst)) == len(pieces)


def test_what_lies_inside_of_another_stretch_is_read_with_it():
    pieces = fetched(plane(Nest(0, 0, 100), Nest(10, 200, 10), Nest(50, 300, 8)), 0).stretches[0].pieces
    assert (pieces.src.tolist(), pieces.length.tolist()) == ([0], [100])


K = Plane((0, 32, 64), (0, 64), (Nest(0, 1000, 32),))
V = Plane((0, 256, 512), (0, 64), (Nest(96, 1032, 32),))
"""K and V of a cell side by side at the destination, in planes of their own at the source."""


def test_what_lies_alike_in_the_cells_of_the_stretched_side_is_one_stretch():
    image = gathered([K, V])
    (stretch,) = image.stretches
    assert stretch.at == (0, 64)
    assert (stretch.pieces.src.tolist(), stretch.pieces.dst.tolist()) == ([0], [1000])
    assert stretch.pieces.length.tolist() == [64]
    assert image.nests == (
        PoolNests(K.src_at, (Nest(0, 0, 32),)),
        PoolNests(V.src_at, (Nest(96, 32, 32),)),
    )


def test_what_lies_apart_in_the_cells_of_the_stretched_side_is_a_stretch_each():
    image = fetched([K, V], 1 << 20)
    assert [(part.at, part.pieces.src.tolist(), part.pieces.dst.tolist()) for part in image.stretches] == [
        (K.src_at, [0], [0]), (V.src_at, [96], [32]),
    ]  # fmt: skip
    assert image.nests == (PoolNests((0, 64), (Nest(0, 1000, 32), Nest(32, 1032, 32))),)
    assert (image.stride, image.bytes, image.longest) == (ALIGNMENT, 64, 32)


def test_a_loop_that_descends_on_one_side_is_gathered_and_cut_out_by_loops_that_ascend():
    backwards = Nest(200, 0, 8, (Loop(3, -100, 8),))
    for image in (gathered(plane(backwards)), fetched(plane(backwards), 0)):
        ((_, nests),) = ((part.at, part.nests) for part in image.nests)
        assert all(loop.src >= 0 and loop.dst >= 0 for nest in nests for loop in nest.loops)
        assert sum(nest.bytes for nest in nests) == 24
    into = gathered(plane(backwards)).nests[0].nests
    assert sorted((nest.dst, nest.src) for nest in into) == [(0, 200), (8, 100), (16, 0)]
