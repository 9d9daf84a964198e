"""Parse and check a peer's transport metadata before NIXL loads it.

Transport metadata is what a NIXL agent needs to read another agent's memory: its address, its registered
regions and their keys. NIXL and UCX do not validate it: an invalid memory kind or a truncated key makes them
read past the end of their arrays. So this module parses it, in the format of NIXL 1.5 (``nixlSerDes``,
``loadRemoteMD``) and of UCX's packed keys (``ucp_rkey_packed_copy``):

    nixlSerDes| Agent name  Conns n  (t backend  c address)*  MemSection
    nixlSecElms n  (bknd backend  nixlDList nixlSDList  t kind  n count  row*)*

Each item consists of a tag, the length of the value in 8 bytes, the value and ``|``. The address of a UCX
worker is not parsed. Instead, a child process tries to use it (`transport.metadata_sandbox`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvferry.common.errors import ProtocolError
from kvferry.geometry import Region
from kvferry.transport.messages import MAX_AGENT_BYTES

MAX_ROWS = 1 << 14
MAX_NAME_BYTES = 4096
MAX_ADDRESS_BYTES = 1 << 14
BACKEND = b"UCX"
# Memory kinds in the order of NIXL's numbers. NIXL has further kinds, which no KV cache uses.
KINDS = ("DRAM", "VRAM")

_START, _END = b"nixlSerDes|", b"|"
_LENGTH_BYTES = 8
_ROW = 24  # number of bytes in front of a row's key: address, length and device, 8 bytes each

# Number of UCX's memory types for host, CUDA and ROCm memory. UCX uses them as indices, unchecked.
_MEMORY_TYPES = 5

_KEY_HEAD = 9
_MOST_ADDRESS = 1 << 63

# UCX parses addresses and keys without knowing their length. It stops at these bytes, which are appended.
_AFTER_ADDRESS = bytes(1 << 16)
_AFTER_KEY = b"\xff" * 16


@dataclass(frozen=True, slots=True)
class Metadata:
    """Parsed transport metadata of an agent, with the memory `regions` that it has registered.

    `sealed` is for NIXL to load: the received metadata with bytes appended to each address and key.
    """

    name: str
    regions: tuple[Region, ...]
    sealed: bytes


def parse_metadata(data: bytes) -> Metadata:
    """Parse an agent's transport metadata. Raise ProtocolError if it is invalid, or exceeds a limit."""
    if len(data) > MAX_AGENT_BYTES:
        raise ProtocolError(f"{len(data)} bytes of transport metadata, at most {MAX_AGENT_BYTES}")
    items = _ItemReader(data)
    try:
        name = items.read_item(b"Agent", MAX_NAME_BYTES, b"").decode()
    except UnicodeDecodeError as error:
        raise ProtocolError("transport metadata has a name that is not UTF-8 text") from error
    if (backends := items.number(b"Conns")) != 1:
        raise ProtocolError(f"transport metadata of {backends} backends, expected {BACKEND.decode()} alone")
    items.expect_item(b"t", BACKEND)
    items.read_item(b"c", MAX_ADDRESS_BYTES, _AFTER_ADDRESS)
    items.expect_item(b"", b"MemSection")
    # The counts are checked before they are used: a peer could make this loop run for hours.
    sections = items.number(b"nixlSecElms")
    if sections > len(KINDS):
        raise ProtocolError(f"transport metadata of {sections} kinds of memory; there are {len(KINDS)}")
    regions = tuple(region for _ in range(sections) for region in _section(items))
    items.end()
    return Metadata(name, regions, bytes(items.sealed))


class MemoryCard(Protocol):
    """The description of an agent's memory, which a peer has sent.

    The word at `words_address` has the incarnation of the agent's process in its high half.
    """

    @property
    def agent(self) -> bytes: ...  # transport metadata
    @property
    def words_address(self) -> int: ...
    @property
    def incarnation(self) -> int: ...
    @property
    def claimed(self) -> Sequence[Region]: ...  # the memory that the metadata must register


def check_metadata(card: MemoryCard) -> Metadata:
    """Parse an agent's metadata. Raise ProtocolError unless it covers all memory in the description."""
    metadata = parse_metadata(card.agent)
    registered = set(metadata.regions)
    for region in card.claimed:
        if region not in registered:
            raise ProtocolError(
                f"the handshake names {region.length} bytes of {region.memory} at {region.address:#x}, which "
                "the transport metadata does not register"
            )
    return metadata


def _section(items: _ItemReader) -> Iterator[Region]:
    items.expect_item(b"bknd", BACKEND)
    items.expect_item(b"nixlDList", b"nixlSDList")
    kind = items.number(b"t", 4)
    if kind >= len(KINDS):
        raise ProtocolError(f"transport metadata names memory kind {kind}, known are 0 to {len(KINDS) - 1}")
    count = items.number(b"n")
    if not 1 <= count <= MAX_ROWS:
        raise ProtocolError(
            f"transport metadata registers {count} regions of a kind, expected 1 to {MAX_ROWS}"
        )
    for _ in range(count):
        row = items.read_item(b"", MAX_AGENT_BYTES, _AFTER_KEY)
        address, length, device = (int.from_bytes(row[at : at + 8], "little") for at in range(0, _ROW, 8))
        if len(row) < _ROW or length < 1 or address + length > _MOST_ADDRESS or device >= 1 << 31:
            raise ProtocolError(
                f"transport metadata registers {length} bytes at {address:#x}, which is impossible"
            )
        _check_key(row[_ROW:])
        yield Region(address, length, KINDS[kind], device)


def _check_key(key: bytes) -> None:
    """Check that a key of UCX, which reads it unchecked, has a known type and all parts of its bit map."""
    if len(key) < _KEY_HEAD or key[_KEY_HEAD - 1] >= _MEMORY_TYPES:
        raise ProtocolError(
            f"transport metadata holds a key of an unknown memory type; expected 0 to {_MEMORY_TYPES - 1}"
        )
    at = _KEY_HEAD
    for _ in range(int.from_bytes(key[: _KEY_HEAD - 1], "little").bit_count()):
        at += 1 + (key[at] if at < len(key) else len(key))
    if at > len(key):
        raise ProtocolError(
            f"transport metadata holds a key of {len(key)} bytes, expected {at} by its own list"
        )


class _ItemReader:
    """Reads items: tag, length and value. Methods raise ProtocolError if an item is not as expected.

    `sealed` is a copy of the items read so far, with the endings that `read_item` appends to values.
    """

    def __init__(self, data: bytes) -> None:
        if not data.startswith(_START):
            raise ProtocolError(
                f"transport metadata begins with {data[: len(_START)]!r}, expected NIXL's {_START!r}"
            )
        self._data, self._at = data, len(_START)
        self.sealed = bytearray(_START)

    def read_item(self, tag: bytes, most: int, ending: bytes) -> bytes:
        """Read an item of 1 to `most` bytes, copy it to `sealed` with `ending` after it, and return it."""
        start = self._at + len(tag) + _LENGTH_BYTES
        head = self._data[self._at : start]
        length = int.from_bytes(head[len(tag) :], "little")
        if len(head) < len(tag) + _LENGTH_BYTES or not head.startswith(tag):
            raise ProtocolError(f"transport metadata lacks {tag.decode() or 'an item'!r} at byte {self._at}")
        if not 1 <= length <= most or self._data[start + length : start + length + 1] != _END:
            raise ProtocolError(
                f"transport metadata: {length} bytes of {tag.decode() or 'an item'!r} at byte {self._at}, "
                f"but {len(self._data) - start} are left and at most {most} are allowed"
            )
        found = self._data[start : start + length]
        self._at = start + length + 1
        whole = found + ending
        self.sealed += tag + len(whole).to_bytes(_LENGTH_BYTES, "little") + whole + _END
        return found

    def expect_item(self, tag: bytes, wanted: bytes) -> None:
        if (found := self.read_item(tag, MAX_NAME_BYTES, b"")) != wanted:
            raise ProtocolError(f"transport metadata names {found[:64]!r}, expected {wanted!r}")

    def number(self, tag: bytes, length: int = 8) -> int:
        if len(found := self.read_item(tag, length, b"")) != length:
            raise ProtocolError(f"transport metadata: {len(found)} bytes of {tag!r}, expected {length}")
        return int.from_bytes(found, "little")

    def end(self) -> None:
        if self._at != len(self._data):
            raise ProtocolError(
                f"transport metadata has {len(self._data) - self._at} bytes after its end, expected none"
            )
