"""The exceptions that kvferry raises.

KVFerryError
├── ConfigError            a setting cannot be used; the message names it, the reason, and what to set
├── GeometryError          memory cannot be described, or a description contradicts itself
├── SilentCopy             an operation on a view of KV cache memory would work on a copy of it
├── Unnameable             no reliable digest of content can be computed; the message tells the reason
│   └── NotYetNamed        content has no digest yet, because a thread is still computing it
├── Incompatible           KV cannot be moved between two engines; one sentence per difference
├── ProtocolError          a message cannot be decoded, or has values that are out of bounds
├── TransferError          bytes could not be moved, or the moved bytes may be wrong
├── ChunkError             a chunk cannot be written to a tier, or a chunk in a tier is damaged
│   ├── OtherVersion       a chunk has another format version; the release that wrote it can read it
│   └── OtherKey           a chunk is encrypted with a key that this engine does not have
└── defined next to the code that raises them, in `kvferry.transport`: AddressNotAllowed; in
    `kvferry.tools.serving`: LaunchError, ListenError, FleetLost (engines), MalformedBody (router),
    CompletionError (demo); in `kvferry.tools.doctor`: IdentifyError, CheckTimeout
"""

from __future__ import annotations

from collections.abc import Sequence


class KVFerryError(Exception):
    """Base class of all exceptions that kvferry raises on purpose."""


class ConfigError(KVFerryError):
    """Raised if a setting cannot be used. The message gives the setting, the reason, and a remedy."""


class GeometryError(KVFerryError):
    """Raised if the layout of KV cache memory cannot be described, or a description contradicts itself."""


class SilentCopy(KVFerryError):
    """Raised if an operation on a view of KV cache memory would return a copy, so that writes are lost."""


class Unnameable(KVFerryError):
    """Raised if the content of a request cannot be identified, so that its KV cannot be stored or found."""


class NotYetNamed(Unnameable):
    """Raised if a digest of content, such as a LoRA adapter's, is not yet computed. Try again later."""


class Incompatible(KVFerryError):
    """Raised if KV cannot be moved between two engines or formats. `differences` has one sentence each."""

    def __init__(self, differences: Sequence[str]) -> None:
        super().__init__("; ".join(differences))
        self.differences = tuple(differences)


class ProtocolError(KVFerryError):
    """Raised if a message cannot be decoded, or has values that are out of bounds."""


class TransferError(KVFerryError):
    """Raised if KV could not be transferred, or if the transferred bytes may be wrong."""


class ChunkError(KVFerryError):
    """Raised if a chunk cannot be written to a tier, or if a chunk in a tier is damaged."""


class OtherVersion(ChunkError):
    """Raised if this release cannot read the format version of a chunk, which is not damaged."""


class OtherKey(ChunkError):
    """Raised if a chunk is encrypted with a key that this engine does not have. It need not be damaged."""
