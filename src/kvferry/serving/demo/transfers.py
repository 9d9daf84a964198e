"""Read the loads of a request from the decode engine's ``transfer_log``."""

from __future__ import annotations

from pathlib import Path

import msgspec


class Transfer(msgspec.Struct, frozen=True):
    """A finished load.

    Attributes:
        request_id: id in the engine, which contains the client's id.
        outcome: ``ready``, ``failed`` or ``expired``.
        tokens: number of loaded tokens.
        bytes: bytes moved, over all groups.
        bytes_by_group: bytes by number and label of the KV cache group.
        full_attention_bytes: bytes if all layers had full attention.
        descriptors: descriptors given to the transport.
        run_bytes: median size of a descriptor.
        plan_seconds: time for planning.
        transfer_seconds: time from posting to completion.
        total_seconds: time from the engine's query to usable blocks.
        peer: name of the producer.
        reason: reason of the failure; None if it succeeded.
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
    """Return the load that served a request, else its last attempt, else None."""
    if not log.exists():
        return None
    lines = [line for line in log.read_bytes().splitlines() if request_id.encode() in line]
    loads = [msgspec.json.decode(line, type=Transfer) for line in lines]
    ready = [load for load in loads if load.outcome == "ready"]
    return ready[-1] if ready else loads[-1] if loads else None
