"""Errors of decoding bytes that a peer sent."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import msgspec

from kvferry.errors import GeometryError, ProtocolError
from kvferry.terminal import shown

# Text that is not UTF-8 is a plain ValueError.
_UNREADABLE = (msgspec.DecodeError, GeometryError, ValueError, OverflowError, RecursionError)


@contextmanager
def as_protocol_error(what: str) -> Iterator[None]:
    """Turn errors of decoders and checks into ProtocolError; `what` names the expected message."""
    try:
        yield
    except _UNREADABLE as error:
        raise ProtocolError(f"not {what}: {shown(str(error), 500)}") from error
