import numpy as np

from kvferry.planning.image import ALIGNMENT, fetched, gathered
from kvferry.planning.nest import Loop, Nest

HALF_OF_THE_HEADS = Nest(512, 0, 512, (Loop(16, 1024, 512),))
"""16 tokens of 2 heads of 512 bytes, the second of them wanted."""


def test_what_is_gathered_is_dense_in_the_destinations_order():
    image = gathered([[HALF_OF_THE_HEADS]])
    (phase,) = image.stretches
    assert (phase.src.tolist(), phase.dst.tolist(), phase.length.tolist()) == ([0], [0], [16 * 512])
    assert image.stride == 16 * 512


def test_what_others_supply_is_left_out_of_a_gathered_image():
    every_other = Nest(0, 1000, 64, (Loop(4, 64, 128),))
    image = gathered([[every_other]])
    (phase,) = image.stretches
    assert phase.src.tolist() == [0, 64, 128, 192]
    assert phase.dst.tolist() == [1000, 1128, 1256, 1384]


def test_gaps_are_read_along_up_to_their_limit():
    assert fetched([[HALF_OF_THE_HEADS]], 511).stretches[0].length.tolist() == [512] * 16
    (whole,) = fetched([[HALF_OF_THE_HEADS]], 512).stretches
    assert (whole.src.tolist(), whole.length.tolist()) == ([512], [15 * 1024 + 512])


def test_nothing_is_read_across_the_beginning_of_a_region():
    nests = [Nest(0, 0, 64), Nest(64, 64, 64)]
    assert len(fetched([nests], 0).stretches[0]) == 1
    assert fetched([nests], 1000, cuts=[0, 64]).stretches[0].src.tolist() == [0, 64]


def test_images_begin_at_whole_words():
    image = gathered([[Nest(0, 0, 5)], [Nest(5, 5, 7)]])
    assert image.stride == ALIGNMENT
    assert image.bytes == 7


def test_an_order_that_loops_cannot_follow_is_taken_apart():
    # Destination: a run of the other nest lies between the first two of this one only.
    loop = Nest(0, 0, 8, (Loop(3, 8, 20),))
    other = Nest(500, 8, 4)
    image = gathered([[loop, other]])
    placed = sorted((nest.dst, nest.src, nest.run) for nest in image.nests[0] for _ in range(nest.rows))
    assert len(image.nests[0]) > 2
    assert sum(nest.bytes for nest in image.nests[0]) == 28
    assert [dst for dst, _, _ in placed][:2] == [0, 8]
    assert image.stretches[0].length.tolist() == [12, 8, 8]


def test_more_stretches_than_are_worth_packing_are_no_image():
    scattered = Nest(0, 0, 1, (Loop(1 << 9, 3, 1 << 10), Loop(1 << 9, 3 << 9, 2)))
    assert gathered([[scattered]]) is None


def test_loops_of_an_image_keep_inside_of_it():
    image = gathered([[Nest(0, 0, 8, (Loop(4, 100, 1000), Loop(3, 8, 16)))]])
    for nest in image.nests[0]:
        pieces = nest.pieces()
        assert pieces.dst.min() >= 0
        assert (pieces.dst + pieces.length).max() <= image.bytes
        assert len(np.unique(pieces.dst)) == len(pieces)


def test_what_lies_inside_of_another_stretch_is_read_with_it():
    (phase,) = fetched([[Nest(0, 0, 100), Nest(10, 200, 10), Nest(50, 300, 8)]], 0).stretches
    assert (phase.src.tolist(), phase.length.tolist()) == ([0], [100])


def test_images_have_room_for_the_largest_phase():
    image = fetched([[Nest(0, 0, 60)], [Nest(0, 0, 70)]], 0)
    assert (image.stride, image.bytes) == (2 * ALIGNMENT, 70)


def test_a_loop_that_descends_on_one_side_is_gathered_and_cut_out_by_loops_that_ascend():
    backwards = Nest(200, 0, 8, (Loop(3, -100, 8),))
    for image in (gathered([[backwards]]), fetched([[backwards]], 0)):
        (nests,) = image.nests
        assert all(loop.src >= 0 and loop.dst >= 0 for nest in nests for loop in nest.loops)
        assert sum(nest.bytes for nest in nests) == 24
    (into,) = gathered([[backwards]]).nests
    assert sorted((nest.dst, nest.src) for nest in into) == [(0, 200), (8, 100), (16, 0)]
