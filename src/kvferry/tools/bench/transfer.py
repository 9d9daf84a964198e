"""`kvferry bench transfer`: measure the transfer of one request between two processes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvferry.tools.bench import rounds
from kvferry.geometry.layout import lay_out
from kvferry.geometry.models import ModelReading
from kvferry.tools.measuring.machine import MachineFacts, machine_facts
from kvferry.tools.measuring.producer_process import ProducerProcess, use_transports
from kvferry.tools.measuring.reader import Reader
from kvferry.tools.measuring.simulated import simulate_engine
from kvferry.tools.plan.side import EngineSide


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferJob:
    """The request whose KV `kvferry bench transfer` moves, and the settings of the measurement.

    Attributes:
        side: layout and block size of both engines, which have one rank each.
        tokens: length of the request.
        order: order of block ids, "scattered" or "contiguous".
        repeats: number of counted rounds.
        transports: value of UCX_TLS, UCX's list of transports; None to leave it unchanged.
    """

    reading: ModelReading
    side: EngineSide
    tokens: int
    order: str
    repeats: int
    transports: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredTransfer:
    """The results of `kvferry bench transfer`."""

    job: TransferJob
    blocks: int
    layers: int
    page_bytes: int
    machine: MachineFacts
    comparison: rounds.TransferComparison


def measure(job: TransferJob, progress: Callable[[str], None]) -> MeasuredTransfer:
    """Move a request's KV between two processes with kvferry, NIXL alone and memcpy, and return the times.

    Args:
        job: request to move. Its `transports` become UCX_TLS in both processes, unless they are None.
        progress: function that is called with a line of text before each step.

    Raises:
        ConfigError: memory cannot be allocated, or NIXL cannot be used.
        TransferError: the second process died, or a transfer failed.
    """
    settings = use_transports(job.transports)
    progress("starting the producer process")
    src, dst = (
        # Other seeds, so that block ids differ as between two engines.
        simulate_engine(name, job.reading, job.side, job.tokens, order=job.order, seed=seed)
        for seed, name in enumerate(("source", "destination"), 1)
    )
    with ProducerProcess([src], settings) as producer, Reader(dst, producer) as reader:
        comparison = rounds.compare(reader, src, job.repeats, progress)
    (group,) = lay_out(dst.model, dst.shape)[0].groups
    return MeasuredTransfer(
        job=job,
        blocks=dst.blocks,
        layers=len(group.layers),
        page_bytes=group.layers[0].page.page_bytes,
        machine=machine_facts(),
        comparison=comparison,
    )
