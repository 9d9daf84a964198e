"""A rank as a process of its own: attaches an arena, and does what it is told over a pipe."""

from __future__ import annotations

import hashlib
import os
import signal

from kvferry.tiers.arena import Arena
from kvferry.tiers.digests import digests_of, intact
from kvferry.tiers.shape import ChunkShape

SHAPE = ChunkShape((4, 2), (70_000, 3_000))


def digest(data, unit_bytes):
    """As many digests of 8 bytes as there are units."""
    pieces = (data[at : at + unit_bytes] for at in range(0, len(data), unit_bytes))
    return b"".join(hashlib.blake2b(piece, digest_size=8).digest() for piece in pieces)


def units_of(rank):
    """Runs of a rank of two: half of each section."""
    return [(2 * rank, 2), (4 + rank, 1)]


def fill(arena, offset, key, rank):
    """Write a rank's units of a chunk; returns what it reports."""
    for first, units in units_of(rank):
        size = SHAPE.unit_bytes[SHAPE.section(first)]
        data = hashlib.shake_128(key + bytes([first])).digest(units * size)
        arena.bytes_at(offset + SHAPE.at(first), len(data))[:] = data
    return [(first, digests_of(arena, offset, SHAPE, first, n, digest)) for first, n in units_of(rank)]


def check(arena, offset, expected, rank):
    """Whether the units of a rank are what was written."""
    return all(intact(arena, offset, SHAPE, first, n, digest, expected) for first, n in units_of(rank))


def rank_process(name, rank, pipe):
    """Until the pipe closes."""
    arena = Arena.attach(name)
    while True:
        try:
            verb, *arguments = pipe.recv()
        except EOFError:
            return
        if verb == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        pipe.send({"fill": fill, "check": check}[verb](arena, *arguments, rank))


def owner_process(size, pipe):
    """Creates an arena, tells its name, and waits to be killed."""
    arena = Arena.create(size)
    arena.memory[:] = 7
    pipe.send(arena.name)
    pipe.recv()
