import numpy as np

from kvferry.planning.cell_copy import ONE_CELL, CellCopy, PoolCopies
from kvferry.planning.packed_image import ALIGNMENT, fetch_image, gather_image
from kvferry.planning.strided_copy import Loop, StridedCopy


def cell_copy(*copies: StridedCopy) -> list[CellCopy]:
    """What moves between blocks that are one cell."""
    return [CellCopy(ONE_CELL, ONE_CELL, copies)]


HALF_OF_THE_HEADS = StridedCopy(512, 0, 512, (Loop(16, 1024, 512),))
"""16 tokens of 2 heads of 512 bytes, the second of them wanted."""


def test_gathered_image_is_dense_in_the_destinations_order():
    image = gather_image(cell_copy(HALF_OF_THE_HEADS))
    descriptors = image.reads[0].descriptors
    assert (descriptors.src.tolist(), descriptors.dst.tolist(), descriptors.length.tolist()) == (
        [0],
        [0],
        [16 * 512],
    )
    assert image.stride == 16 * 512


def test_gathered_image_leaves_out_bytes_of_other_sources():
    every_other = StridedCopy(0, 1000, 64, (Loop(4, 64, 128),))
    image = gather_image(cell_copy(every_other))
    descriptors = image.reads[0].descriptors
    assert descriptors.src.tolist() == [0, 64, 128, 192]
    assert descriptors.dst.tolist() == [1000, 1128, 1256, 1384]


def test_gaps_up_to_the_limit_are_read():
    assert fetch_image(cell_copy(HALF_OF_THE_HEADS), 511).reads[0].descriptors.length.tolist() == [512] * 16
    whole = fetch_image(cell_copy(HALF_OF_THE_HEADS), 512).reads[0].descriptors
    assert (whole.src.tolist(), whole.length.tolist()) == ([512], [15 * 1024 + 512])


def test_read_never_crosses_the_beginning_of_a_region():
    copies = [StridedCopy(0, 0, 64), StridedCopy(64, 64, 64)]
    assert len(fetch_image(cell_copy(*copies), 0).reads[0].descriptors) == 1
    assert fetch_image(cell_copy(*copies), 1000, region_starts=[0, 64]).reads[0].descriptors.src.tolist() == [
        0,
        64,
    ]


def test_images_begin_at_whole_words():
    image = gather_image(cell_copy(StridedCopy(0, 0, 5)))
    assert image.stride == ALIGNMENT
    assert image.bytes == 5


def test_order_that_loops_cannot_follow_is_split():
    # Destination: a run of the other copy lies between the first two of this one only.
    loop = StridedCopy(0, 0, 8, (Loop(3, 8, 20),))
    other = StridedCopy(500, 8, 4)
    image = gather_image(cell_copy(loop, other))
    placed = sorted(
        (copy.dst, copy.src, copy.run) for copy in image.pool_copies[0].nests for _ in range(copy.run_count)
    )
    assert len(image.pool_copies[0].nests) > 2
    assert sum(copy.bytes for copy in image.pool_copies[0].nests) == 28
    assert [dst for dst, _, _ in placed][:2] == [0, 8]
    assert image.reads[0].descriptors.length.tolist() == [12, 8, 8]


def test_longest_run_is_that_of_any_cell_copy():
    short = CellCopy((0, 8), ONE_CELL, (StridedCopy(0, 0, 4),))
    long = CellCopy((0, 16), ONE_CELL, (StridedCopy(100, 100, 12),))
    assert [fetch_image(cell_copies, 0).longest for cell_copies in ([short, long], [long, short])] == [12, 12]


def test_too_many_runs_make_no_image():
    scattered = StridedCopy(0, 0, 1, (Loop(1 << 9, 3, 1 << 10), Loop(1 << 9, 3 << 9, 2)))
    assert gather_image(cell_copy(scattered)) is None


def test_loops_of_an_image_keep_inside_of_it():
    image = gather_image(cell_copy(StridedCopy(0, 0, 8, (Loop(4, 100, 1000), Loop(3, 8, 16)))))
    for copy in image.pool_copies[0].nests:
        descriptors = copy.descriptors()
        assert descriptors.dst.min() >= 0
        assert (descriptors.dst + descriptors.length).max() <= image.bytes
        assert len(np.unique(descriptors.dst)) == len(descriptors)


def test_run_inside_another_is_read_with_it():
    descriptors = (
        fetch_image(cell_copy(StridedCopy(0, 0, 100), StridedCopy(10, 200, 10), StridedCopy(50, 300, 8)), 0)
        .reads[0]
        .descriptors
    )
    assert (descriptors.src.tolist(), descriptors.length.tolist()) == ([0], [100])


K = CellCopy((0, 32, 64), (0, 64), (StridedCopy(0, 1000, 32),))
V = CellCopy((0, 256, 512), (0, 64), (StridedCopy(96, 1032, 32),))
"""K and V of a cell side by side at the destination, in planes of their own at the source."""


def test_runs_alike_in_all_cells_are_one_read():
    image = gather_image([K, V])
    (stretch,) = image.reads
    assert stretch.at == (0, 64)
    assert (stretch.descriptors.src.tolist(), stretch.descriptors.dst.tolist()) == ([0], [1000])
    assert stretch.descriptors.length.tolist() == [64]
    assert image.pool_copies == (
        PoolCopies(K.src_offsets, (StridedCopy(0, 0, 32),)),
        PoolCopies(V.src_offsets, (StridedCopy(96, 32, 32),)),
    )


def test_runs_apart_in_a_cell_are_a_read_each():
    image = fetch_image([K, V], 1 << 20)
    read = [(part.at, part.descriptors.src.tolist(), part.descriptors.dst.tolist()) for part in image.reads]
    assert read == [(K.src_offsets, [0], [0]), (V.src_offsets, [96], [32])]
    assert image.pool_copies == (PoolCopies((0, 64), (StridedCopy(0, 1000, 32), StridedCopy(32, 1032, 32))),)
    assert (image.stride, image.bytes, image.longest) == (ALIGNMENT, 64, 32)


def test_a_loop_that_descends_on_one_side_is_gathered_and_cut_out_by_loops_that_ascend():
    backwards = StridedCopy(200, 0, 8, (Loop(3, -100, 8),))
    for image in (gather_image(cell_copy(backwards)), fetch_image(cell_copy(backwards), 0)):
        ((_, copies),) = ((part.at, part.nests) for part in image.pool_copies)
        assert all(loop.src >= 0 and loop.dst >= 0 for copy in copies for loop in copy.loops)
        assert sum(copy.bytes for copy in copies) == 24
    into = gather_image(cell_copy(backwards)).pool_copies[0].nests
    assert sorted((copy.dst, copy.src) for copy in into) == [(0, 200), (8, 100), (16, 0)]
