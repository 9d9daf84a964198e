"""Read the KV loads of a request from the decode engine's ``transfer_log``."""

from __future__ import annotations

from pathlib import Path

import msgspec


class Transfer(msgspec.Struct, frozen=True):
    """A finished KV load: one line of the transfer log.

    Attributes:
        request_id: id that the decode engine gave the request. It contains the id that the client sent.
        outcome: ``ready`` if the load succeeded, ``expired`` if it was not complete in time, ``failed`` if
            it failed for another reason.
        bytes: bytes of KV that were loaded, without gaps that are read and discarded.
        bytes_by_group: these bytes by the group's number and kind, such as ``0 full_attention``.
        full_attention_bytes: bytes that the load would have moved if all layers had full attention.
        reads: number of reads of the load: more than 1 if the KV was read while it was computed.
        descriptors: number of transfer descriptors, after adjacent ones are merged.
        run_bytes: length of the longest contiguous run that is transferred.
        transfer_seconds: time from posting the reads to their completion.
        total_seconds: time from the decode engine's first query about the request's KV until the loaded
            blocks are usable.
        reason: reason for the failure; None if the load succeeded.
    """

    request_id: str
    outcome: str
    tokens: int
    bytes: int
    bytes_by_group: dict[str, int]
    full_attention_bytes: int
    reads: int
    descriptors: int
    run_bytes: int
    plan_seconds: float
    transfer_seconds: float
    total_seconds: float
    peer: str
    reason: str | None


def read_transfer(log: Path, request_id: str) -> Transfer | None:
    """Return the last successful load of a request, or the last one if all failed; None if there is none."""
    if not log.exists():
        return None
    # The engine's id of a request contains the client's.
    lines = [line for line in log.read_bytes().splitlines() if request_id.encode() in line]
    loads = [msgspec.json.decode(line, type=Transfer) for line in lines]
    ready = [load for load in loads if load.outcome == "ready"]
    return ready[-1] if ready else loads[-1] if loads else None
