"""Transport metadata as NIXL 1.5 writes it, and what can be wrong with it."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

from kvferry.geometry import Region

KEY = (3).to_bytes(8, "little") + b"\0" + b"\4abcd" + b"\2xy" + b"\xff"
"""A key with parts for two memory domains."""


def item(tag: bytes, value: bytes | int) -> bytes:
    data = value.to_bytes(8, "little") if isinstance(value, int) else value
    return tag + len(data).to_bytes(8, "little") + data + b"|"


def row(region: Region, key: bytes = KEY) -> bytes:
    return b"".join(n.to_bytes(8, "little") for n in (region.address, region.length, region.device)) + key


def written(
    rows: Sequence[bytes],
    name: bytes = b"P/0.0/64",
    address: bytes = b"some address",
    kind: int = 0,
    sections: int = 1,
    backend: bytes = b"UCX",
    backends: bytes | int = 1,
    count: int | None = None,
) -> bytes:
    """Metadata with one section of these rows."""
    head = item(b"Agent", name) + item(b"Conns", backends) + item(b"t", backend) + item(b"c", address)
    section = (
        item(b"bknd", b"UCX") + item(b"nixlDList", b"nixlSDList") + item(b"t", kind.to_bytes(4, "little"))
    )
    section += item(b"n", len(rows) if count is None else count) + b"".join(item(b"", one) for one in rows)
    return b"nixlSerDes|" + head + item(b"", b"MemSection") + item(b"nixlSecElms", sections) + section


def value(data: bytes, tag: bytes, after: int = 0) -> tuple[int, int]:
    """Where the value of the first item of this tag lies, at or after a byte."""
    at = data.index(b"|" + tag, after) + 1 + len(tag)
    return at + 8, at + 8 + int.from_bytes(data[at : at + 8], "little")


def mutations(data: bytes, count: int, seed: int) -> Iterator[tuple[str, bytes]]:
    """Yield (what was done, metadata) so many times, all ways of damage in turn."""
    chance = random.Random(seed)
    low, high = value(data, b"c", value(data, b"Conns")[1])
    for number in range(count):
        spoiled, at = bytearray(data), chance.randrange(low, high)
        match (0, 1, 5, 6, 0, 1, 5, 7, 0, 1, 5, 6, 0, 2, 3, 4)[number % 16]:
            case 0:
                what, at = "a bit anywhere", chance.randrange(len(data))
                spoiled[at] ^= 1 << chance.randrange(8)
            case 1:
                what = "a byte of the address"
                spoiled[at] = chance.randrange(256)
            case 2:
                what = "ten bytes of the address"
                for _ in range(10):
                    spoiled[chance.randrange(low, high)] = chance.randrange(256)
            case 3:
                what = "another address"
                spoiled[low:high] = chance.randbytes(high - low)
            case 4:
                what = "an address cut short"
                spoiled[low - 8 : high] = (at - low).to_bytes(8, "little") + data[low:at]
            case 5:
                what, at = "a byte of a key", len(data) - 1 - chance.randrange(1, 12)
                spoiled[at] = chance.randrange(256)
            case 6:
                what = "cut short"
                del spoiled[chance.randrange(len(data)) :]
            case _:
                what, spoiled = "random bytes", bytearray(b"nixlSerDes|" + chance.randbytes(len(data)))
        yield f"{number}: {what} ({at})", bytes(spoiled)
