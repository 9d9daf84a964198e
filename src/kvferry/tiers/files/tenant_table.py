"""The bytes of each tenant in a directory: a table in the ledger's file, behind the ledger.

A tenant has a record of 16 bytes. A record of 0 bytes in use is free for another tenant. Integers are
unsigned and little-endian::

    tenant (6), zeros (2), bytes in use (8)
"""

from __future__ import annotations

import os
import struct
from collections.abc import Mapping

import numpy as np

_RECORD = struct.Struct("<6s 2x Q")
_RECORDS = np.dtype([("tenant", "V6"), ("zeros", "V2"), ("used", "<u8")])
MOST_BYTES = 1 << 24
"""Maximum size of a table, of a million tenants. Those that do not fit are not counted."""


class TenantTable:
    """The table of a ledger that this process has locked. It is read when it is first used.

    `fd` is the ledger's file, and the table begins at `offset`.
    """

    def __init__(self, fd: int, offset: int) -> None:
        self._fd, self._offset = fd, offset
        self._read: bytearray | None = None

    @property
    def size(self) -> int:
        """Size of the table in bytes."""
        return len(self._data)

    def used(self) -> dict[bytes, int]:
        """Return the bytes in use by tenant, of those that use any."""
        return parse_table(bytes(self._data))

    def growth(self, tenant: bytes) -> int:
        """Return the bytes by which the table grows if the tenant begins to use any."""
        at = self._place(tenant)
        return _RECORD.size if at is not None and at == len(self._data) else 0

    def add(self, tenant: bytes, size: int) -> None:
        """Add to the bytes of a tenant, or subtract from them if `size` is negative, but not below zero."""
        if (at := self._place(tenant)) is None:
            return
        # A free record has 0 bytes in use.
        used = _RECORD.unpack_from(self._data, at)[1] if at < len(self._data) else 0
        record = _RECORD.pack(tenant, max(0, used + size))
        self._data[at : at + _RECORD.size] = record
        os.pwrite(self._fd, record, self._offset + at)

    def replace(self, used: Mapping[bytes, int]) -> None:
        """Write the table anew."""
        records = b"".join(_RECORD.pack(tenant, size) for tenant, size in used.items() if size)
        self._read = bytearray(records[:MOST_BYTES])
        os.ftruncate(self._fd, self._offset)
        if records:
            os.pwrite(self._fd, self._read, self._offset)

    @property
    def _data(self) -> bytearray:
        if self._read is None:
            size = min(os.fstat(self._fd).st_size - self._offset, MOST_BYTES)
            self._read = bytearray(os.pread(self._fd, max(0, size), self._offset))
            # A killed process may have written a part of a record.
            del self._read[len(self._read) // _RECORD.size * _RECORD.size :]
        return self._read

    def _place(self, tenant: bytes) -> int | None:
        """Return the position of a tenant's record, or of one to take; None if the table is full."""
        data, at = self._data, -1
        while (at := data.find(tenant, at + 1)) >= 0:
            if at % _RECORD.size == 0 and _RECORD.unpack_from(data, at)[1]:
                return at
        free = np.flatnonzero(np.frombuffer(bytes(data), _RECORDS)["used"] == 0)
        at = int(free[0]) * _RECORD.size if len(free) else len(data)
        return at if at < MOST_BYTES else None


def parse_table(data: bytes) -> dict[bytes, int]:
    """Return the bytes in use by tenant in the bytes of a table."""
    records = np.frombuffer(data[: len(data) // _RECORD.size * _RECORD.size], _RECORDS)
    return {tenant: used for tenant, _, used in records.tolist() if used}
