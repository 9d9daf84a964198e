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
        tokens: number of loaded tokens.
        bytes: number of bytes of KV that were loaded, over all KV cache groups, without gaps that are read
            and discarded.
        bytes_by_group: number of these bytes for each KV cache group. A key is the group's number and kind,
            such as ``0 full_attention``.
        full_attention_bytes: number of bytes that the load would have moved if all layers had full attention.
        reads: number of reads of the load: more than 1 if the KV was read while it was computed.
        descriptors: number of transfer descriptors, after adjacent ones are merged.
        run_bytes: length in bytes of the longest contiguous run that is transferred.
        plan_seconds: time to plan the reads, in seconds.
        transfer_seconds: time from posting the reads to their completion, in seconds.
        total_seconds: time from the decode engine's first query about the request's KV until the loaded
            blocks are usable, in seconds.
        peer: name of the engine that the KV was read from.
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
    """Read the KV load of a request from the transfer log.

    If there are several loads, return the last successful load, or the last load if all failed. Return None
    if there is no load.

    Args:
        log: path of the decode engine's transfer log; it may not exist yet.
        request_id: id that the client gave the request. The engine's id contains it.
    """
    if not log.exists():
        return None
    lines = [line for line in log.read_bytes().splitlines() if request_id.encode() in line]
    loads = [msgspec.json.decode(line, type=Transfer) for line in lines]
    ready = [load for load in loads if load.outcome == "ready"]
    return ready[-1] if ready else loads[-1] if loads else None
