"""Requests for which no source is asked, and the reason why not."""

from __future__ import annotations

from kvferry.connector.bids import saves_computation
from kvferry.connector.decisions import MissReason
from kvferry.connector.engine import Request
from kvferry.units import counted


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
