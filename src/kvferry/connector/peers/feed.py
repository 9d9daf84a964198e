"""The parts of a load from a peer, ordered as the peer computes them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvferry.connector.events import MissReason
from kvferry.connector.load import GroupBytes, Load
from kvferry.connector.messages import LoadPart, Report
from kvferry.connector.peers.pull import Pull
from kvferry.planning.increments import next_part
from kvferry.tiers.names import PEER
from kvferry.transport.handshake import Unusable
from kvferry.transport.read_order import ReadOrder


class PeerFeed:
    """Orders the parts of one load from a peer, one for each stretch of KV that the peer has computed."""

    origin = PEER

    def __init__(
        self,
        load: Load,
        pull: Pull,
        *,
        alignment_tokens: int,
        labels: Sequence[str],
        update: Callable[[Pull], Unusable | None],
        on_failed: Callable[[Pull, Report], None],
    ) -> None:
        """Create the feed of a load that begins now.

        Args:
            load: load to order.
            pull: state of the exchange with the peer. It has a grant.
            alignment_tokens: alignment of the positions at which two parts may meet (`common_alignment`).
            labels: label of each KV cache group of this engine.
            update: takes in the peer's last answer, and returns why its KV cannot be read any more.
            on_failed: called if the load has failed and its request waits for it.
        """
        self._load, self._pull, self._alignment_tokens, self._labels = load, pull, alignment_tokens, labels
        self._update, self._on_failed = update, on_failed
        self._done, self._parts, self._ready = load.span.begins, 0, 0
        self._dropped = False
        pull.loading = True

    def next_parts(self) -> Sequence[LoadPart]:
        load, pull = self._load, self._pull
        unusable = Unusable("no request waits for it any more") if self._dropped else self._update(pull)
        if unusable is not None:
            return [LoadPart(load.key, None, failure=unusable.reason)]
        news, self._ready = pull.ready > self._ready, pull.ready
        assert pull.grant is not None
        assert pull.incarnation is not None
        span = next_part(
            load.span,
            self._done,
            pull.ready,
            alignment_tokens=self._alignment_tokens,
            whole=pull.is_whole,
        )
        if span is None:
            # The load's deadline begins anew with each part, so the workers are told of progress that cannot
            # be read yet.
            return [LoadPart(load.key, None)] if news else []
        self._done, self._parts = span.ends, self._parts + 1
        order = ReadOrder(
            key=f"{load.key}.{self._parts}",
            peer=pull.peer,
            span=span,
            src_tables=pull.grant.block_ids,
            dst_tables=load.tables,
            lease=pull.grant.word(pull.incarnation),
        )
        return [LoadPart(load.key, order, last=span.ends == load.span.ends)]

    def drop(self) -> None:
        # The workers cannot cancel reads in flight.
        self._dropped, self._pull.loading = True, False

    def moved(self, report: Report) -> tuple[GroupBytes, ...]:
        figures = report.figures
        each = zip(self._labels, figures.strategy_by_group, figures.bytes_by_group, strict=False)
        return tuple(GroupBytes(label, strategy, size) for label, strategy, size in each if size)

    def miss(self, report: Report) -> MissReason:
        return MissReason.DEADLINE if report.late else MissReason.FAILED

    def ended(self, report: Report, *, wanted: bool) -> None:
        self._pull.loading = False
        if wanted and report.failure is not None:
            self._on_failed(self._pull, report)
