"""The parts of loads from peers, ordered as the peers compute them."""

from __future__ import annotations

from collections.abc import Callable

from kvferry.connector.load import Load
from kvferry.connector.messages import LoadPart
from kvferry.connector.peers.pull import Pull
from kvferry.planning import increments
from kvferry.transport.handshake import Unusable
from kvferry.transport.read_order import ReadOrder


class LoadFeed:
    """Orders the parts of one load from a peer. KV that the peer has computed is ordered as one part.

    Attributes:
        pull: state of the exchange with the peer.
    """

    def __init__(self, load: Load, pull: Pull, alignment_tokens: int) -> None:
        """Create the feed of a load that begins now.

        Args:
            load: load to order.
            pull: state of the exchange with the peer. It has a grant.
            alignment_tokens: alignment of the positions at which two parts may meet, in tokens
                (`common_alignment`).
        """
        self.pull = pull
        self._load, self._alignment_tokens = load, alignment_tokens
        self._done, self._parts, self._ready = load.span.begins, 0, 0

    def next_part(self, failure: str | None) -> LoadPart | None:
        """Return the next message about the load to the workers; None if there is nothing to tell them.

        The workers are also told that the peer has computed more, if nothing of it can be read yet. With each
        message the load's deadline begins anew.

        Args:
            failure: reason why the peer's KV cannot be read any more; None if it can.
        """
        load, pull = self._load, self.pull
        news, self._ready = pull.ready > self._ready, pull.ready
        if failure is not None:
            return LoadPart(load.key, None, failure=failure)
        assert pull.grant is not None
        assert pull.incarnation is not None
        span = increments.next_part(
            load.span,
            self._done,
            pull.ready,
            alignment_tokens=self._alignment_tokens,
            whole=pull.is_whole,
        )
        if span is None:
            return LoadPart(load.key, None) if news else None
        self._done, self._parts = span.ends, self._parts + 1
        order = ReadOrder(
            key=f"{load.key}.{self._parts}",
            peer=pull.peer,
            span=span,
            src_tables=pull.grant.block_ids,
            dst_tables=load.tables,
            lease=pull.grant.word(pull.incarnation),
        )
        return LoadPart(load.key, order, last=span.ends == load.span.ends)


class LoadFeeds:
    """The feeds of all loads of which something is still to be ordered. Only the engine's thread calls it."""

    def __init__(self) -> None:
        """Create the object. There are no loads yet."""
        self._feeds: dict[str, LoadFeed] = {}
        self._dropped: list[LoadPart] = []

    @property
    def calm(self) -> bool:
        """True if there is nothing to tell the workers, now or later."""
        return not (self._feeds or self._dropped)

    @property
    def peers(self) -> set[str]:
        """Names of the peers of which something is still to be read."""
        return {feed.pull.peer for feed in self._feeds.values()}

    def begin(self, load: Load, pull: Pull, alignment_tokens: int) -> None:
        """Order a load from the coming step on.

        Args:
            load: load that begins now.
            pull: state of the exchange with the peer. It has a grant.
            alignment_tokens: alignment of the positions at which two parts may meet, in tokens.
        """
        self._feeds[load.key] = LoadFeed(load, pull, alignment_tokens)

    def forget(self, load: Load) -> None:
        """Order nothing more of a load that has ended."""
        self._feeds.pop(load.key, None)

    def drop(self, load: Load) -> None:
        """Tell the workers that a load gets no further parts, if some were still to come."""
        if self._feeds.pop(load.key, None) is not None:
            self._dropped.append(LoadPart(load.key, None, failure="no request waits for it any more"))

    def take_parts(self, failure_of: Callable[[Pull], Unusable | None]) -> list[LoadPart]:
        """Return the messages of the coming step to the workers.

        Args:
            failure_of: function that takes in the peer's last answer, and returns why its KV cannot be read
                any more; None if it can.
        """
        parts, self._dropped = self._dropped, []
        for key, feed in list(self._feeds.items()):
            unusable = failure_of(feed.pull)
            part = feed.next_part(None if unusable is None else unusable.reason)
            if part is not None:
                parts.append(part)
                if part.last or part.failure is not None:
                    del self._feeds[key]
        return parts
