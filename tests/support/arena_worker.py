"""A rank as a process of its own: attaches an arena, and does what it is told over a pipe."""

from __future__ import annotations

import hashlib
import os
import signal

from kvferry.tiers.host.arena import Arena

CHUNK_BYTES = 280 << 10
"""Of a chunk; every one of two ranks writes a half."""


def content(key):
    return hashlib.shake_128(key).digest(CHUNK_BYTES)


def fill(arena, rank, offset, key):
    """Write a rank's half of a chunk."""
    half = CHUNK_BYTES // 2
    arena.bytes_at(offset + rank * half, half)[:] = content(key)[rank * half :][:half]


def check(arena, rank, offset, key):
    """Whether both halves are what was written."""
    return arena.bytes_at(offset, CHUNK_BYTES) == content(key)


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
        pipe.send({"fill": fill, "check": check}[verb](arena, rank, *arguments))


def owner_process(size, pipe):
    """Creates an arena, tells its name, and waits to be killed."""
    arena = Arena.create(size)
    arena.memory[:] = 7
    pipe.send(arena.handle)
    pipe.recv()
