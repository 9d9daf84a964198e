"""Bytes go between memory and files whole, past the page cache or through it."""

from __future__ import annotations

import errno
import fcntl
import os

import pytest

from kvferry.tiers.files import chunk_file as direct_io
from kvferry.tiers.files.chunk_file import read_all, set_direct, whole_pages, write_all

SIZE = 5 * 4096


@pytest.fixture
def fd(tmp_path):
    found = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    yield found
    os.close(found)


def pages(size=SIZE):
    made = whole_pages(size)
    made[:] = os.urandom(size)
    return made


def amid_a_page(size=SIZE):
    return pages(size + 4096)[100 : 100 + size]


def is_direct(fd):
    return bool(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT)


def there_and_back(fd, *pieces):
    """Write and read; whether reading gives what was written."""
    write_all(fd, pieces)
    assert os.fstat(fd).st_size == sum(map(len, pieces))
    into = [pages(SIZE)[: len(piece)] for piece in pieces]
    assert read_all(fd, into) == sum(map(len, pieces))
    return all(one == other for one, other in zip(pieces, into, strict=True))


def test_whole_pages_go_past_the_page_cache(fd):
    if not set_direct(fd, on=True):
        pytest.skip("this file system has no direct I/O")
    set_direct(fd, on=False)
    assert there_and_back(fd, pages(4096), pages())
    assert is_direct(fd)


@pytest.mark.parametrize("piece", [amid_a_page(), pages()[:5000], amid_a_page()[:1]], ids=len)
def test_memory_that_is_not_whole_pages_is_written_and_read_all_the_same(fd, piece):
    write_all(fd, [pages(4096), piece])
    into = amid_a_page()[: len(piece)]
    assert read_all(fd, [pages(4096), into]) == 4096 + len(piece)
    assert into == piece


def test_a_file_system_without_direct_io_is_written_and_read_all_the_same(fd, monkeypatch):
    call = fcntl.fcntl

    def refused(fd, what, flags=0):
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return call(fd, what, flags)

    monkeypatch.setattr(fcntl, "fcntl", refused)
    assert there_and_back(fd, pages(4096), pages())


@pytest.mark.parametrize("name", ["pwritev", "preadv"])
def test_a_device_of_larger_blocks_than_pages_is_written_and_read_all_the_same(fd, monkeypatch, name):
    call, refused = getattr(os, name), []

    def refusing(fd, pieces, at):
        if is_direct(fd):
            refused.append(at)
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return call(fd, pieces, at)

    monkeypatch.setattr(os, name, refusing)
    assert there_and_back(fd, pages(4096), pages())
    assert refused in ([0], [])


@pytest.mark.parametrize("name", ["pwritev", "preadv"])
@pytest.mark.parametrize("most", [1000, 4096, 3 * 4096])
def test_partial_transfer_is_continued(fd, monkeypatch, name, most):
    call, moved = getattr(os, name), []

    def in_part(fd, pieces, at):
        moved.append(call(fd, [pieces[0][:most]], at))
        return moved[-1]

    monkeypatch.setattr(os, name, in_part)
    assert there_and_back(fd, pages(4096), pages())
    assert sum(moved) == 4096 + SIZE
    assert max(moved) <= most


@pytest.mark.parametrize("size", [0, 1, 4096, 5000, SIZE - 1])
def test_a_file_that_ends_early_is_read_as_far_as_it_goes(fd, size):
    content = pages()
    os.pwrite(fd, content[:size], 0)
    into = pages(4096), pages(SIZE - 4096)
    assert read_all(fd, into) == size
    assert b"".join(into)[:size] == content[:size]


def test_an_error_is_an_error(fd, monkeypatch):
    def broken(fd, pieces, at):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(direct_io.os, "preadv", broken)
    with pytest.raises(OSError, match="Input/output error"):
        read_all(fd, [pages()])


def test_a_write_that_stops_is_an_error(fd, monkeypatch):
    monkeypatch.setattr(direct_io.os, "pwritev", lambda fd, pieces, at: 0 if at else 4096)
    with pytest.raises(OSError, match="writing stopped after 4096 of 20480 bytes"):
        write_all(fd, [pages()])
