"""Chunks go to files and come back whole, digested piece by piece as they are read."""

from __future__ import annotations

import os
from functools import partial

import pytest
from hypothesis import given, strategies as st

from kvferry.tiers.files import chunk_file
from kvferry.tiers.files.chunk_file import read_chunk, set_direct, whole_pages, write_chunk
from kvferry.tiers.format import decode as images
from kvferry.tiers.format.chunk import Chunk, ChunkGroup, ChunkSection
from support.chunk_files import CHUNKS, body_of, image, verify_bytes
from support.examples import examples

pytestmark = pytest.mark.slow

LARGE = Chunk(
    bytes(32),
    bytes(20),
    (ChunkGroup("full", 64, (ChunkSection("k", 5, 12 << 10), ChunkSection("v", 3, 4100))),),
)


@pytest.fixture(autouse=True, params=[4096, 2 * 4096, 4 << 20], ids=["page", "pages", "whole"])
def piece(request):
    """How much is read and digested at a time, from storage as from memory."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (images, chunk_file):
            patch.setattr(module, "PIECE_BYTES", request.param)
        patch.setattr(chunk_file, "STORAGE_PIECE_BYTES", request.param)
        yield request.param


@pytest.fixture
def fd(tmp_path):
    found = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    yield found
    os.close(found)


def in_file(call, content=b""):
    """What a call says of a file, and what the file holds then."""
    fd = os.memfd_create("chunk")
    try:
        os.pwrite(fd, content, 0)
        return call(fd), os.pread(fd, 1 << 20, 0)
    finally:
        os.close(fd)


@examples(60)
@given(CHUNKS)
def test_written_chunk_file_is_the_image_and_is_read_back(chunk: Chunk) -> None:
    body = body_of(chunk)
    _, written = in_file(lambda fd: write_chunk(fd, chunk, body))
    assert written == image(chunk)
    verify_bytes(written)
    into = whole_pages(chunk.body_bytes)
    assert in_file(lambda fd: read_chunk(fd, chunk, into), written)[0] is True
    assert into == body


@examples(60)
@given(CHUNKS, st.data())
def test_changed_byte_is_detected(chunk: Chunk, data: st.DataObject) -> None:
    made = bytearray(image(chunk))
    made[data.draw(st.integers(0, len(made) - 1))] ^= data.draw(st.integers(1, 255))
    into = whole_pages(chunk.body_bytes)
    assert in_file(lambda fd: read_chunk(fd, chunk, into), made)[0] is False


@examples(60)
@given(CHUNKS, st.data())
def test_a_file_that_ends_early_is_no_image_even_if_memory_holds_the_rest(
    chunk: Chunk, data: st.DataObject
) -> None:
    made = image(chunk)[: data.draw(st.integers(0, chunk.file_bytes - 1))]
    into = whole_pages(chunk.body_bytes)
    into[:] = image(chunk)[chunk.offsets[0] :]
    assert in_file(lambda fd: read_chunk(fd, chunk, into), made)[0] is False


def test_a_unit_of_several_pieces_is_digested_whole() -> None:
    _, made = in_file(lambda fd: write_chunk(fd, LARGE, body_of(LARGE)))
    verify_bytes(made)
    into = whole_pages(LARGE.body_bytes)
    for at in range(LARGE.offsets[0], LARGE.file_bytes, 2048):
        spoiled = bytearray(made)
        spoiled[at] ^= 1
        assert in_file(lambda fd: read_chunk(fd, LARGE, into), spoiled)[0] is False


@pytest.mark.parametrize("name", ["preadv", "pwritev"])
@pytest.mark.parametrize("after", [0, 1, 2])
def test_a_broken_disk_is_an_error(fd, monkeypatch, name, after, piece):
    write_chunk(fd, LARGE, body_of(LARGE))
    calls = []

    def broken(*args):
        calls.append(args)
        if len(calls) > after:
            raise OSError(5, "broken")
        return move(*args)

    move = getattr(os, name)
    monkeypatch.setattr(os, name, broken)
    moving = partial(read_chunk if name == "preadv" else write_chunk, fd, LARGE, body_of(LARGE))
    pieces = -(-LARGE.body_bytes // piece) if name == "preadv" else 1
    if after < pieces:
        with pytest.raises(OSError, match="broken"):
            moving()
    else:
        moving()
        assert len(calls) == pieces


def test_pieces_are_digested_while_later_ones_are_read(fd, monkeypatch, piece):
    write_chunk(fd, LARGE, body_of(LARGE))
    done = []
    move = os.preadv
    monkeypatch.setattr(os, "preadv", lambda *args: done.append("read") or move(*args))
    monkeypatch.setattr(images, "unit_digests", partial(digests, images.unit_digests, done))
    monkeypatch.setattr(images, "xxh3_128", partial(RecordedDigest, images.xxh3_128, done))
    assert read_chunk(fd, LARGE, body_of(LARGE))
    last_read = len(done) - 1 - done[::-1].index("read")
    assert ("digest" in done[:last_read]) == (piece < LARGE.body_bytes)


class RecordedDigest:
    def __init__(self, make, done):
        self._digest, self._done = make(), done

    def update(self, piece):
        self._digest.update(piece)
        self._done.append("digest")

    def digest(self):
        return self._digest.digest()


def digests(call, done, *args):
    made = call(*args)
    done.append("digest")
    return made


@pytest.mark.parametrize(("cached", "sizes"), [(True, [5, 4, 4, 4, 3]), (False, [5, 8, 7])])
def test_storage_is_read_in_larger_pieces_than_the_page_cache(fd, monkeypatch, cached, sizes):
    if not set_direct(fd, on=True):
        pytest.skip("this file system has no direct I/O")
    write_chunk(fd, LARGE, body_of(LARGE))
    if cached:
        set_direct(fd, on=False)
        os.pread(fd, LARGE.file_bytes, 0)
    found, move = [], os.preadv

    def seen(*args):
        read = move(*args)
        found.append(read // 4096)
        return read

    monkeypatch.setattr(os, "preadv", seen)
    for name, pages in (("PIECE_BYTES", 4), ("STORAGE_PIECE_BYTES", 8)):
        monkeypatch.setattr(chunk_file, name, pages * 4096)
    assert read_chunk(fd, LARGE, body_of(LARGE))
    assert found == sizes


def test_a_read_that_is_cut_short_goes_on(fd, monkeypatch):
    body = body_of(LARGE)
    write_chunk(fd, LARGE, body)
    move, into = os.preadv, whole_pages(LARGE.body_bytes)
    monkeypatch.setattr(os, "preadv", lambda fd, views, at: move(fd, [views[0][:4096]], at))
    assert read_chunk(fd, LARGE, into)
    assert into == body
