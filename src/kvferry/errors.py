"""What kvferry raises.

KVFerryError
├── ConfigError            a setting that cannot be used; the message says which, why, and what to set
├── GeometryError          memory that cannot be described, or a description that contradicts itself
├── SilentCopy             an operation on a view of a cache that would have gone on with a copy of it
├── Unnameable             content whose name would not be certain; the message says what is ambiguous
│   └── NotYetNamed        the same, for now: a digest is being computed
├── Incompatible           two descriptions between which bytes cannot be moved; one sentence per difference
├── ProtocolError          a message of a peer that cannot be understood or is out of bounds
├── TransferError          bytes that could not be moved, or that cannot be trusted after they were
├── ChunkError             a chunk of a cache tier that cannot be written, or whose bytes cannot be believed
│   └── OtherVersion       a chunk of another format version, which the release that wrote it can read
└── beside the code that raises them, in `kvferry.transport`: AddressNotAllowed; in `kvferry.serving`:
    LaunchError, ListenError, FleetLost (engines), MalformedBody (router), CompletionError (demo);
    in `kvferry.doctor`: IdentifyError, CheckTimeout
"""

from __future__ import annotations

from collections.abc import Sequence


class KVFerryError(Exception):
    """Root of everything kvferry raises on purpose."""


class ConfigError(KVFerryError):
    """A setting that cannot be used."""


class GeometryError(KVFerryError):
    """Memory that cannot be described, or a description that contradicts itself."""


class SilentCopy(KVFerryError):
    """An operation on a view of a cache that would have gone on with a copy of it."""


class Unnameable(KVFerryError):
    """Content whose name would not be certain: a token id out of range, a fact that has no exact text."""


class NotYetNamed(Unnameable):
    """Content whose name is not known yet: a thread computes its digest. Ask again."""


class Incompatible(KVFerryError):
    """Two descriptions between which bytes cannot be moved.

    Attributes:
        differences: one sentence each, all of them, not only the first.
    """

    def __init__(self, differences: Sequence[str]) -> None:
        super().__init__("; ".join(differences))
        self.differences = tuple(differences)


class ProtocolError(KVFerryError):
    """A message of a peer that cannot be understood or is out of bounds."""


class TransferError(KVFerryError):
    """Bytes that could not be moved, or that cannot be trusted after they were."""


class ChunkError(KVFerryError):
    """A chunk of a cache tier that cannot be written, or whose bytes cannot be believed."""


class OtherVersion(ChunkError):
    """A chunk of another format version, which the release that wrote it can read."""
