"""The tokens of a request in the engine's own prefix cache, and whether more may be loaded at all.

To continue a prompt, layers with full attention need the KV of all tokens, and layers with recurrent state
need one snapshot. A load leaves its snapshot inside a block, where no later request can share it. Requests
can still share the attention blocks before it. So the engine may have more attention blocks than it can use
without a load:

    attention blocks   0 ──────────────────────────▶ 512
    with a snapshot    0 ────▶ 128
    a source has       0 ──────────────────────────────────▶ 631

Here a load brings the attention KV of tokens 512 to 630 and the snapshot after 631 tokens. The engine shares
its blocks up to token 512, and nothing is copied. If no source has more than 512 tokens, two cases are left:

- A source has the snapshot of a shorter prefix, for example after 500 tokens. The engine then finds fewer
  attention blocks: those up to the last block boundary before token 500. The load brings the rest.
- No source has a snapshot after token 128. The engine continues from there.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvferry.connector.bids import saves_computation
from kvferry.connector.engine import PrefixCache, Request
from kvferry.connector.events import MissReason
from kvferry.units import counted


@dataclass(frozen=True, slots=True)
class LocalPrefix:
    """The part of a request's prompt that is in the engine's own prefix cache.

    Attributes:
        tokens: number of tokens whose attention blocks the engine has.
        resumable_tokens: number of tokens after which the engine can continue without a load; at most
            `tokens`.
    """

    tokens: int
    resumable_tokens: int

    @classmethod
    def of(cls, cache: PrefixCache | None, request: Request, tokens: int) -> LocalPrefix:
        """Look up the number of tokens after which the engine can continue a request without a load.

        Args:
            cache: the engine's prefix cache; None if the engine can always continue after `tokens` tokens.
            request: the request.
            tokens: number of the request's tokens whose attention blocks the engine has.
        """
        if cache is None or not tokens:
            return cls(tokens, tokens)
        return cls(tokens, min(tokens, cache.resumable_tokens(request)))

    @property
    def needs_load(self) -> bool:
        """True if the engine can use all of its attention blocks only after a load."""
        return self.resumable_tokens < self.tokens


def last_boundary_before(end: int, alignment_tokens: int) -> int:
    """Return the position of the last block boundary before the last token of a prefix.

    A prefix cache that finds this many tokens leaves at least one token to a load that ends at `end`.

    Args:
        end: length of the prefix in tokens, at least 1.
        alignment_tokens: number of tokens between two block boundaries.

    >>> last_boundary_before(512, 128), last_boundary_before(500, 128), last_boundary_before(513, 128)
    (384, 384, 512)
    """
    return (end - 1) // alignment_tokens * alignment_tokens


def must_compute(request: Request, local_tokens: int) -> tuple[MissReason, str] | None:
    """Return why the engine must compute a request rather than load KV; None if sources may be asked.

    Args:
        request: the request.
        local_tokens: number of tokens of the request in the engine's own prefix cache.

    Returns:
        (reason, explanation), the explanation as text for people; or None.
    """
    if (why := request.cache_refusal) is not None:
        return MissReason.SKIPPED, f"{why}, so the engine computes the whole prompt"
    if saves_computation(request.num_tokens - local_tokens):
        return None
    if local_tokens:
        return (
            MissReason.LOCAL,
            f"{local_tokens} of {counted(request.num_tokens, 'token')} here, and the last is always computed",
        )
    return MissReason.SHORT_PROMPT, "its only token is always computed"
