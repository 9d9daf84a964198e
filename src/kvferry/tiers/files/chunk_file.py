"""Files of a cache directory: open them without trusting names, write and verify chunks, record their use.

A chunk is read in pieces. Each piece is digested at once, while it is still in the CPU cache. Files go past
the page cache (direct I/O), unless it has them. All functions block, and any thread may call them.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial

import numpy as np

from kvferry.common.errors import ChunkError
from kvferry.common.machine import fcntl
from kvferry.tiers.files.page_cache import in_page_cache
from kvferry.tiers.format.chunk import ALIGNMENT, SEGMENT_BYTES, TAG_BYTES, Buffer, Chunk
from kvferry.tiers.format.decode import (
    PIECE_BYTES,
    check_body,
    is_chunk,
    is_expected,
    make_header,
    read_header,
)
from kvferry.tiers.format.encryption import EncryptionKeys

# Only this user, because a chunk reveals its prompt.
_FILE_MODE, _FOLDER_MODE = 0o600, 0o700

# Errors when a link, a socket or pipe, a folder, or a device without a driver is opened as a plain file.
_NO_FILE = (errno.ELOOP, errno.ENXIO, errno.EISDIR, errno.ENODEV)

# Disks and network mounts are faster with fewer, larger reads than memory.
STORAGE_PIECE_BYTES = 4 << 20

# A repeated use within this time is not recorded, because on a shared mount each record is a message.
_USE_SECONDS = 10.0
# The present time divided by this lies in the first weeks of 1970. Cold files keep their order, and are
# evicted before all others.
_COLD_DIVISOR = 1000
# An earlier time, in nanoseconds since 1970, is that of a cold file.
FIRST_USE_NS = 365 * 86_400 * 10**9
# Difference between the times of two files that were used together, so that their order is recorded.
_APART_NS = 1000


class NotRegular(OSError):
    """Raised if something else is found where a regular file or a directory is expected, such as a link."""


def open_regular(path: str, flags: int) -> int:
    """Open a plain file with flags of `os.open`, or raise OSError: `NotRegular` for anything else."""
    # A user who can write to the directory can put a link, a pipe, a device or a folder in place of a file.
    # The path to the directory itself may contain links.
    try:
        fd = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC, _FILE_MODE)
    except OSError as error:
        if error.errno in _NO_FILE:
            raise NotRegular(error.errno, "expected a plain file", path) from error
        raise
    try:
        # The flags refuse links only. A pipe or device opens at once, and is recognized here.
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise NotRegular(errno.ENXIO, "expected a plain file", path)
    except BaseException:
        os.close(fd)
        raise
    return fd


def read_regular(path: str, most: int) -> bytes:
    """Return the first `most` bytes of a plain file, or fewer if the file is shorter."""
    with os.fdopen(open_regular(path, os.O_RDONLY), "rb") as file:
        return file.read(most)


def is_regular(path: str) -> bool:
    """Return whether a path is a plain file, not a link."""
    try:
        return stat.S_ISREG(os.lstat(path).st_mode)
    except OSError:
        return False


def check_folders(root: str, path: str) -> None:
    """Raise OSError unless the folders between `root` and a file, both excluded, are plain folders."""
    while len(path := os.path.dirname(path)) > len(root):
        if not stat.S_ISDIR(os.lstat(path).st_mode):
            raise NotRegular(errno.ENOTDIR, "expected a plain folder", path)


def make_folder(root: str, folder: str) -> None:
    """Create a folder below `root`, and its missing parents. Raise OSError if something else has a name."""
    if len(above := os.path.dirname(folder)) > len(root):
        make_folder(root, above)
    with suppress(FileExistsError):
        os.mkdir(folder, _FOLDER_MODE)
    # mkdir also says that the name exists if it is a link.
    check_folders(root, f"{folder}/")


def sync_folder(folder: str) -> None:
    """Flush the entries of a folder to the disk, so that new names in it survive a crash."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def set_cold(fd: int, clock: Callable[[], float]) -> int:
    """Set the modification time of a file so that it is evicted before all files with a time of use.

    Return this time, in nanoseconds.
    """
    cold = int(clock() * 1e9) // _COLD_DIVISOR
    # Without this time, the file is evicted like others.
    with suppress(OSError):
        os.utime(fd, ns=(cold, cold))
    return cold


def mark_files_used(root: str, paths: Iterable[str], clock: Callable[[], float]) -> None:
    """Mark files below `root` as used about now, the first to be evicted first. Skip files that fail."""
    latest = 0
    for path in paths:
        with suppress(OSError):
            check_folders(root, path)
            last, now = os.lstat(path).st_mtime_ns, int(clock() * 1e9)
            # A time far in the future comes from a wrong clock. Replace it, or the next files would need
            # later times. Each write is a message on a shared mount: skip it if the order is right and the
            # time recent.
            if last <= latest or abs(now - last) >= _USE_SECONDS * 1e9:
                last = max(now, latest + _APART_NS)
                os.utime(path, ns=(last, last), follow_symlinks=False)
            latest = max(last, latest)


def whole_pages(size: int) -> memoryview:
    """Return new, uninitialised memory of `size` bytes that begins at a page boundary."""
    # numpy, because a bytearray would be zeroed first.
    spare = np.empty(size + ALIGNMENT, np.uint8)
    first = -spare.__array_interface__["data"][0] % ALIGNMENT
    return spare.data[first : first + size]


def write_all(fd: int, pieces: Sequence[Buffer]) -> None:
    """Write buffers one after another, from the beginning of a file."""
    written = _transfer(os.pwritev, fd, pieces, 0, direct=True)
    if written < (size := sum(memoryview(piece).nbytes for piece in pieces)):
        raise OSError(errno.EIO, f"writing stopped after {written} of {size} bytes")


def read_all(fd: int, pieces: Sequence[Buffer], begin: int = 0, *, direct: bool = True) -> int:
    """Fill buffers from a file, from offset `begin`. Return the bytes read: fewer only if the file ends."""
    return _transfer(os.preadv, fd, pieces, begin, direct=direct)


def set_direct(fd: int, *, on: bool) -> bool:
    """Turn direct I/O on or off for a file, and clear its other flags. Return whether it is on."""
    if not hasattr(os, "O_DIRECT"):
        return False  # macOS
    try:
        fcntl.fcntl(fd, fcntl.F_SETFL, os.O_DIRECT if on else 0)
    except OSError:
        return False
    return on


def _transfer(
    move: Callable[[int, Sequence[memoryview], int], int],
    fd: int,
    pieces: Sequence[Buffer],
    begin: int,
    *,
    direct: bool,
) -> int:
    """Call `move`, `os.preadv` or `os.pwritev`, until all is moved or it returns 0."""
    left, done = [memoryview(piece).cast("B") for piece in pieces], 0
    direct = set_direct(fd, on=direct)
    while left:
        try:
            moved = move(fd, left, begin + done)
        except OSError as error:
            if not (direct and error.errno == errno.EINVAL):
                raise
            # Address or length of the memory is not a multiple of the device's block size, which may exceed
            # a page. The rest goes through the page cache.
            direct = set_direct(fd, on=False)
            continue
        if not moved:
            break
        done += moved
        while left and moved >= len(left[0]):
            moved -= len(left.pop(0))
        if left:
            left[0] = left[0][moved:]
    return done


def write_chunk(fd: int, chunk: Chunk, body: memoryview) -> None:
    """Write the header and the body of a chunk to an empty file, and zero the padding of the body."""
    header = whole_pages(chunk.offsets[0])
    header[:] = make_header(chunk, body)
    write_all(fd, (header, body))


def read_chunk(fd: int, chunk: Chunk, into: memoryview) -> bool:
    """Read a chunk into memory. Return whether the file is exactly the expected chunk.

    `into` has the size of the chunk's body. Its content is valid only if the result is True.
    """
    # Direct I/O of pages in the cache would take the disk's time. Reading others through the cache takes
    # twice as long as direct I/O, and displaces pages of other programs.
    cached = in_page_cache(fd, chunk.file_bytes)
    piece_bytes = PIECE_BYTES if cached else STORAGE_PIECE_BYTES
    # Header and first piece in one read: a small chunk needs no other.
    header, piece = whole_pages(chunk.offsets[0]), into[:PIECE_BYTES]
    done = read_all(fd, (header, piece), direct=not cached)
    ended = done < len(header) + len(piece)

    def read_up_to(size: int) -> None:
        nonlocal done, ended
        while done < len(header) + size and not ended:
            at = done - len(header)
            piece = into[at : at + piece_bytes]
            read = _read_more(fd, piece, done, direct=not cached)
            done, ended = done + read, read < len(piece)

    # The digest pulls the pieces, so one pass over the memory is enough.
    good = is_chunk(chunk, header, into, read_up_to)
    return done == chunk.file_bytes and good


def _read_more(fd: int, piece: memoryview, begin: int, *, direct: bool) -> int:
    """Fill a buffer from offset `begin` after a call of `read_all`. Return the bytes read, as it does."""
    try:
        # Direct I/O is as `read_all` left it, which saves two system calls per piece.
        read = os.preadv(fd, [piece], begin)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        read = 0
    if read < len(piece):
        read += read_all(fd, [piece[read:]], begin + read, direct=direct)
    return read


def write_encrypted(fd: int, chunk: Chunk, body: memoryview, keys: EncryptionKeys) -> None:
    """Encrypt a chunk into an empty file, and zero the padding of the body."""
    # The library is loaded only where chunks are encrypted.
    from kvferry.tiers.format.cipher import encrypt_chunk, encrypted_room  # noqa: PLC0415

    write_all(fd, (encrypt_chunk(chunk, body, keys.newest, whole_pages(encrypted_room(chunk))),))


def read_encrypted(fd: int, chunk: Chunk, into: memoryview, keys: EncryptionKeys) -> bool:
    """Read and decrypt a chunk into memory. Return whether the file is exactly the expected chunk.

    `into` has the size of the chunk's body. Its content is valid only if the result is True. False: the file
    is valid, but describes other groups, tokens or sections.

    Raises:
        ChunkError: the file is damaged, is not encrypted, or contains another chunk.
        OtherKey: the file is encrypted with a key that `keys` lacks.
    """
    from kvferry.tiers.format.cipher import SegmentCipher  # noqa: PLC0415

    cached = in_page_cache(fd, chunk.file_bytes)
    piece_bytes, begin = PIECE_BYTES if cached else STORAGE_PIECE_BYTES, chunk.offsets[0]
    first = min(piece_bytes, len(into))
    memory = whole_pages(begin + first + TAG_BYTES)
    # Header and first piece in one read: a small chunk needs no other.
    done = read_all(fd, (memory[: begin + first],), direct=not cached)

    def read_header_at(offset: int, size: int) -> Buffer:
        if offset + size <= done:
            return memory[offset : offset + size]
        # The header of other groups may be longer. It is read at offsets that direct I/O refuses.
        set_direct(fd, on=False)
        return read(fd, offset, size)

    header = read_header(read_header_at, os.fstat(fd).st_size)
    expected = is_expected(header, chunk)
    # First, because it also tells whether the header is authentic.
    cipher = SegmentCipher(header, keys)
    if not expected:
        return False
    piece = memory[begin:]
    for at in range(0, len(into), piece_bytes):
        size = min(piece_bytes, len(into) - at)
        if at:
            done += _read_more(fd, piece[:size], begin + at, direct=not cached)
        if done < begin + at + size:
            raise ChunkError(f"the file ends after {done} of {chunk.file_bytes} bytes")
        # At once, while the piece is in the CPU cache.
        cipher.decrypt(at // SEGMENT_BYTES, piece[: size + TAG_BYTES], into[at : at + size])
    return True


def explain_refusal(fd: int, chunk: Chunk, body: memoryview) -> None:
    """Raise an error that says why `read_chunk` into `body` returned False.

    Return if the header is valid and has the expected key, but describes other groups, tokens or sections.
    ChunkError: the file is damaged, or contains another chunk. OtherKey: it is encrypted. OSError: it cannot
    be read, or has changed.
    """
    # Headers are read at offsets and in sizes that direct I/O refuses.
    set_direct(fd, on=False)
    header = read_header(partial(read, fd), os.fstat(fd).st_size)
    if not is_expected(header, chunk):
        return
    if header.encryption is None:
        check_body(header, body)
    raise OSError(errno.EIO, "the header changed between two reads")


def read(fd: int, offset: int, size: int) -> Buffer:
    """Return the `size` bytes at `offset` of a file, or fewer if the file ends earlier."""
    data = b""
    while len(data) < size and (piece := os.pread(fd, size - len(data), offset + len(data))):
        data += piece
    return data
