"""What moved for a request, as the decode engine's ``transfer_log`` has it."""

from __future__ import annotations

from pathlib import Path

import msgspec


class Transfer(msgspec.Struct, frozen=True):
    """One finished load.

    Attributes:
        request_id: the engine's own, which contains the id that the client sent.
        outcome: ``ready``, ``failed`` or ``expired``.
        tokens: loaded.
        bytes: moved, over all groups.
        bytes_by_group: the same per KV cache group, under its number and label.
        full_attention_bytes: what would have moved if all layers were full attention.
        descriptors: pieces that the transport was given.
        run_bytes: length of one such piece, the median.
        plan_seconds: our own arithmetic.
        transfer_seconds: from posting to done.
        total_seconds: from the engine's question to usable blocks.
        peer: where from.
        reason: why it is not ready.
    """

    request_id: str
    outcome: str
    tokens: int
    bytes: int
    bytes_by_group: dict[str, int]
    full_attention_bytes: int
    descriptors: int
    run_bytes: int
    plan_seconds: float
    transfer_seconds: float
    total_seconds: float
    peer: str
    reason: str | None


def read_transfer(log: Path, request_id: str) -> Transfer | None:
    """The load that served this request, else the last that was tried, else None."""
    if not log.exists():
        return None
    lines = [line for line in log.read_bytes().splitlines() if request_id.encode() in line]
    loads = [msgspec.json.decode(line, type=Transfer) for line in lines]
    ready = [load for load in loads if load.outcome == "ready"]
    return ready[-1] if ready else loads[-1] if loads else None
