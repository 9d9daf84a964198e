"""Convert errors of decoding a peer's bytes into ProtocolError."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import msgspec

from kvferry.errors import GeometryError, ProtocolError
from kvferry.terminal import shown

# Text that is not UTF-8 raises a plain ValueError.
_UNREADABLE = (msgspec.DecodeError, GeometryError, ValueError, OverflowError, RecursionError)


@contextmanager
def as_protocol_error(what: str) -> Iterator[None]:
    """Context manager for decoding a message: errors in the data are raised as ProtocolError.

    Args:
        what: name of the expected message, for the error's text "not {what}: …".
    """
    try:
        yield
    except _UNREADABLE as error:
        raise ProtocolError(f"not {what}: {shown(str(error), 500)}") from error
