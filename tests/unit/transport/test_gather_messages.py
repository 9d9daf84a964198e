"""Messages of the gather channel: what would gather elsewhere or endlessly is a ProtocolError, in words."""

import msgspec
import numpy as np
import pytest
from hypothesis import given, strategies as st

from kvferry.common.errors import ProtocolError
from kvferry.planning.cell_copy import PoolCopies
from kvferry.planning.strided_copy import Loop, StridedCopy
from kvferry.transport.gather_client import (
    MAX_CELLS,
    MAX_LOOPS,
    MAX_ROUTES,
    MAX_STRIDED_COPIES,
    AnnounceRoutes,
    Done,
    Gather,
    Gathered,
    GatherRoute,
    decode_reply,
    decode_request,
)
from kvferry.transport.messages import PROTOCOL, encode
from support.examples import examples

QUICK = examples(100)
COPY = StridedCopy(4096, 64, 8, (Loop(3, 100, 16), Loop(2, 8, 8)))


def introduce(
    *copies: StridedCopy, stride: int = 128, blocks: int = 9, planes: int = 1, at=(0,)
) -> AnnounceRoutes:
    return AnnounceRoutes(
        PROTOCOL, [GatherRoute(4096, blocks, stride, (PoolCopies(at, copies or (COPY,)),) * planes)]
    )


def ids(*blocks: int) -> bytes:
    return np.array(blocks, np.int32).tobytes()


def test_blocks_and_cells_are_read_as_they_were_written():
    blocks, cells = Gather(1, 0, 0, 0, ids(5, 2**31 - 1, 1), ids(0, 3, 0)).places()
    assert (blocks.tolist(), cells.tolist()) == ([5, 2**31 - 1, 1], [0, 3, 0])


numbers = st.one_of(
    st.integers(-4, 200),
    st.sampled_from([1 << 20, 1 << 31, 1 << 40, (1 << 63) - 1, -(1 << 63), (1 << 64) - 1]),
)
anything = st.builds(
    StridedCopy,
    numbers,
    numbers,
    numbers,
    st.lists(st.builds(Loop, numbers, numbers, numbers), max_size=3).map(tuple),
)


@QUICK
@given(st.lists(anything, min_size=1, max_size=2))
def test_copies_that_are_let_in_keep_inside_of_their_image_and_fill_no_byte_of_it_for_ever(copies):
    try:
        message = decode_request(encode(introduce(*copies)))
    except ProtocolError:
        return
    assert isinstance(message, AnnounceRoutes)
    assert sum(copy.bytes for copy in copies) <= 128
    for copy in copies:
        # Only the image's side: the addresses to read are checked against the pool, when it is viewed.
        loops = tuple(Loop(loop.count, 0, loop.dst) for loop in copy.loops)
        descriptors = StridedCopy(0, copy.dst, copy.run, loops).descriptors()
        assert descriptors.dst.min() >= 0
        assert (descriptors.dst + descriptors.length).max() <= 128


@pytest.mark.parametrize(
    ("copy", "says"),
    [
        (StridedCopy(0, -1, 8), r"writes bytes \[-1, 7\) of a packed cell; expected them in \[0, 128\)"),
        (StridedCopy(0, 121, 8), r"writes bytes \[121, 129\) of a packed cell"),
        (StridedCopy(0, 0, 8, (Loop(17, 8, 8),)), r"writes bytes \[0, 136\)"),
        (StridedCopy(0, 0, 8, (Loop(1 << 62, 0, 1 << 62),)), "writes bytes"),
        (
            StridedCopy(0, 0, 8, (Loop(1 << 40, 0, 0),)),
            f"copies of {8 << 40} bytes into a packed cell of 128",
        ),
        (
            StridedCopy(0, 0, 1, (Loop(64, 0, 1), Loop(64, 0, 1))),
            "copies of 4096 bytes into a packed cell of 128",
        ),
        (StridedCopy(0, 64, 8, (Loop(2, 8, -8),)), "runs of 8 bytes in loops"),
        (StridedCopy(64, 0, 8, (Loop(2, -8, 8),)), "runs of 8 bytes in loops"),
        (StridedCopy(0, 0, 8, (Loop(1, 8, 1 << 62),)), "runs of 8 bytes in loops"),
        (StridedCopy(0, 0, 0), "runs of 0 bytes"),
        (StridedCopy(0, 0, 1, (Loop(2, 0, 0),) * (MAX_LOOPS + 1)), "runs of 1 bytes in loops"),
    ],
)
def test_a_copy_that_would_write_elsewhere_or_endlessly_is_refused(copy, says):
    with pytest.raises(ProtocolError, match=says):
        decode_request(encode(introduce(copy)))


@pytest.mark.parametrize(
    ("message", "says"),
    [
        (
            introduce(*[StridedCopy(0, 0, 1)] * 2, planes=MAX_STRIDED_COPIES // 2 + 1),
            f"{MAX_STRIDED_COPIES + 2} planes or strided copies",
        ),
        (
            AnnounceRoutes(
                PROTOCOL, [GatherRoute(1, 1, 64, (PoolCopies((0,), ()),) * (MAX_STRIDED_COPIES + 1))]
            ),
            "planes or strided copies",
        ),
        (
            AnnounceRoutes(PROTOCOL, [GatherRoute(1, 1, 64, (PoolCopies((0,), ()),))] * (MAX_ROUTES + 1)),
            f"{MAX_ROUTES + 1} routes, at most",
        ),
        (introduce(planes=0), "a route of 0 planes and"),
        (introduce(blocks=0), "0 blocks"),
        (introduce(at=()), r"offsets of 0 cells, which begin with \[\]; expected 0 offsets"),
        (introduce(at=(0, -8)), r"offsets of 2 cells, which begin with \[0, -8\]; expected 2 offsets"),
        (introduce(at=(0, 1 << 40)), "offsets of 2 cells, which begin with"),
        (
            AnnounceRoutes(
                PROTOCOL,
                [GatherRoute(64, 9, 128, (PoolCopies((0, 8), (COPY,)), PoolCopies((0, 8, 16), (COPY,))))],
            ),
            "offsets of 3 cells, .*expected 2 offsets",
        ),
        (
            introduce(StridedCopy(0, 0, 1), planes=2, at=tuple(range(MAX_CELLS // 2 + 1))),
            f"offsets of {MAX_CELLS + 2} cells, at most {MAX_CELLS}",
        ),
        (
            introduce(StridedCopy(0, 0, 64), StridedCopy(0, 0, 65)),
            "copies of 129 bytes into a packed cell of 128",
        ),
        (introduce(StridedCopy(0, 0, 65), planes=2), "copies of 130 bytes into a packed cell of 128"),
        (introduce(stride=129), "packed cells every 129 bytes"),
        (AnnounceRoutes(PROTOCOL + 1, []), f"protocol {PROTOCOL + 1} there, {PROTOCOL} here"),
        (introduce(stride=1 << 40), "not a gather request"),
        (Gather(1, 0, 0, 0, b"", b""), "0 bytes of block ids"),
        (Gather(1, 0, 0, 0, b"12345", b"12345"), "5 bytes of block ids"),
        (Gather(1, 0, 0, 0, ids(1, 2), ids(0)), "8 bytes of block ids and 4 of cells"),
        (Gather(1, 0, 0, 0, bytes(4 * MAX_CELLS + 4), ids(0)), "not a gather request"),
        (Gather(1, 0, 0, 0, ids(0), bytes(4 * MAX_CELLS + 4)), "not a gather request"),
        (Gather(1 << 31, 0, 0, 0, ids(1), ids(0)), "not a gather request"),
        (Gather(1, 0, 0, 1 << 32, ids(1), ids(0)), "not a gather request"),
        (Done(-1), "not a gather request"),
    ],
)
def test_values_out_of_bounds_are_refused_in_words(message, says):
    with pytest.raises(ProtocolError, match=says):
        decode_request(encode(message))


@pytest.mark.parametrize("reply", [Gathered(7, -1, 0, 0), Gathered(7, 1 << 31, 0, 0), Gathered(7, 0, -1, 0)])
def test_an_answer_that_names_no_place_is_refused(reply):
    with pytest.raises(ProtocolError, match="not an answer"):
        decode_reply(encode(reply))


def test_as_many_copies_as_allowed_are_let_in():
    message = introduce(StridedCopy(0, 0, 1), planes=MAX_STRIDED_COPIES, stride=MAX_STRIDED_COPIES)
    assert decode_request(msgspec.msgpack.encode(message)) == message
