"""Peers: whether this engine can read from them, which the workers are connected to, how blocks meet."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from math import gcd

from kvferry.common.errors import Incompatible
from kvferry.common.units import counted
from kvferry.connector.content import CHUNK_TOKENS, TurnNames
from kvferry.connector.engine import Request
from kvferry.connector.peers.claims import blocks_of, layers_of
from kvferry.connector.source import common_alignment
from kvferry.geometry import RankGeometry
from kvferry.planning.template import absent_layer_names, window_mismatches
from kvferry.transport.control_client import ControlClient
from kvferry.transport.handshake import Address, PeerInfo, Pending, Unusable
from kvferry.transport.messages import KeptTurn, RankCard
from kvferry.transport.turns import TurnContent, shared_tokens

logger = logging.getLogger(__name__)

UNUSED_SECONDS = 600.0
"""Seconds without a read after which workers disconnect a peer, which may be gone. Reconnecting is cheap."""


def check_readable(theirs: Sequence[RankCard], ours: Sequence[RankCard]) -> None:
    """Check that each rank of this engine can read all layers of its KV cache from the peer's ranks.

    Raises:
        Incompatible: a rank cannot read a layer, or the peer keeps fewer tokens of a layer than a rank needs
            (a shorter attention window). The message names every difference.
    """
    peer, here = ([card.geometry for card in cards] for cards in (theirs, ours))
    absent = absent_layer_names(peer, here)
    if found := [text for rank in here for text in window_mismatches(peer, rank)]:
        raise Incompatible(list(dict.fromkeys(found)))
    # Without the KV of draft layers answers stay right: only fewer drafts are accepted.
    if absent:
        logger.warning(
            "the peer does not keep %s of our draft model, %s for one: prompts from there are "
            "loaded without them, and fewer drafts are accepted; run both with the same draft model if that "
            "matters", counted(len(absent), "layer"), absent[0],
        )  # fmt: skip


class PeerConnections:
    """The peers that the workers are connected to, or shall connect to. Only the engine's thread calls it."""

    def __init__(self, ranks: Sequence[RankGeometry], clock: Callable[[], float]) -> None:
        """Create the record. The workers are connected to no peer yet.

        Args:
            ranks: geometry of this engine's ranks.
            clock: returns monotonic seconds.
        """
        self._clock = clock
        self._groups, self._alignments = blocks_of(ranks), dict[str, tuple[int, ...]]()
        self._attending = layers_of(ranks, attend_to_all=True)
        self._alignment_tokens = common_alignment((one.kind, one.block_tokens) for one in ranks[0].groups)
        self._new: dict[str, PeerInfo] = {}
        # Time of each peer's last use. The one unused for longest is first.
        self._used: dict[str, float] = {}

    @property
    def has_new(self) -> bool:
        """Whether the workers shall connect to a peer."""
        return bool(self._new)

    def use(self, name: str, peer: PeerInfo) -> None:
        """Record that a load uses a peer, and have the workers connect to it if they are not connected.

        Args:
            name: name of the peer.
            peer: description of the peer, from the handshake.
        """
        if name not in self._used:
            self._new[name] = peer
        # The peer moves to the end of the dictionary, which is in the order of last use.
        self._used.pop(name, None)
        self._used[name] = self._clock()

    def start_anew(self) -> None:
        """Forget all peers, because the workers have ended their connections."""
        self._new.clear()
        self._used.clear()

    def take_new(self) -> dict[str, tuple[RankCard, ...]]:
        """Return, and forget, the handshakes of the ranks of peers to connect to, by name of the peer."""
        found = {name: peer.ranks for name, peer in self._new.items()}
        self._new.clear()
        return found

    def take_unused(self, reading: Callable[[], Collection[str]]) -> list[str]:
        """Return, and forget, the peers that no load has used for `UNUSED_SECONDS`.

        Args:
            reading: returns the names of peers of which something is still to be read. They stay. It is
                called only if peers are unused.
        """
        oldest = self._clock() - UNUSED_SECONDS
        unused = [name for name, _ in takewhile(lambda one: one[1] < oldest, self._used.items())]
        if not unused:
            return []
        kept = reading()
        found = [name for name in unused if name not in kept]
        for name in found:
            del self._used[name]
            self._alignments.pop(name, None)
        return found

    def alignments(self, name: str, peer: PeerInfo | Pending | Unusable) -> tuple[int, ...]:
        """Return the alignment of content loaded from a peer, in tokens, for each KV cache group.

        It is the greatest common divisor of the block sizes of both engines, or 1 until the handshake is
        complete.

        Args:
            name: name of the peer.
            peer: description of the peer; another answer if the handshake is not complete.
        """
        if not isinstance(peer, PeerInfo):
            return (1,) * len(self._groups)
        if name not in self._alignments:
            theirs = blocks_of(card.geometry for card in peer.ranks)
            self._alignments[name] = tuple(
                gcd(block, *(tokens for tokens, names in theirs if names & layers))
                for block, layers in self._groups
            )
        return self._alignments[name]

    def part_alignment(self, peer: PeerInfo | Pending | Unusable) -> int:
        """Return the alignment of positions at which two parts of a load from a peer may meet, in tokens.

        It is 0 if the load has only one part: the peer gives the blocks of some layers, which attend to all
        tokens here, only with the last tokens.

        Args:
            peer: description of the peer; another answer if the handshake is not complete.
        """
        if not isinstance(peer, PeerInfo):
            return self._alignment_tokens
        others = layers_of((card.geometry for card in peer.ranks), attend_to_all=False)
        return 0 if self._attending & others else self._alignment_tokens


@dataclass(frozen=True, slots=True)
class FoundTurn:
    """A turn at a peer that a new prompt can use from its start.

    Attributes:
        tokens: number of usable tokens, from the start of the prompt.
        address: address of the peer's control channel.
        kept: the peer's answer, with the block tables and the lease.
    """

    tokens: int
    address: Address
    kept: KeptTurn


class TurnFinder:
    """Asks peers for earlier turns of conversations. Only the engine's thread calls it."""

    def __init__(
        self, client: ControlClient, keepers: Callable[[], Mapping[Address, int]], names: TurnNames
    ) -> None:
        """Create a finder that has asked nothing yet.

        Args:
            client: control channel to the peers.
            keepers: returns the run (incarnation) of each peer that keeps turns, by address.
            names: computes the digests by which peers look up turns.
        """
        self._client, self._keepers, self._names = client, keepers, names
        self._asked: dict[str, tuple[int, TurnContent]] = {}

    def __contains__(self, request_id: str) -> bool:
        """Return True if peers were asked for this request and `found` has not returned the result yet."""
        return request_id in self._asked

    def ask(self, request: Request) -> bool:
        """Ask peers for an earlier turn of a request's conversation. Return False if none can be asked.

        `found` returns the result.
        """
        keepers = self._keepers()
        # Turns are found by keys of whole chunks, and the last token of a prompt is always computed.
        if not keepers or request.num_tokens <= CHUNK_TOKENS:
            return False
        content = self._names.content(request, request.num_tokens)
        if content is None or (number := self._client.ask_turn(keepers, content)) is None:
            return False
        self._asked[request.request_id] = number, content
        return True

    def found(self, request: Request) -> FoundTurn | Pending | None:
        """Return the turn that shares the most tokens with a request's prompt; None if there is none.

        Return Pending while peers have not answered. Call it only if `ask` returned True.
        """
        number, content = self._asked[request.request_id]
        answers = self._client.turns(number)
        if answers is None:
            return Pending()
        del self._asked[request.request_id]
        usable = [
            (tokens, address, kept)
            for address, kept in answers
            if (tokens := _usable(content, kept, request.num_tokens)) > 0
        ]
        return FoundTurn(*max(usable, key=lambda one: one[0])) if usable else None

    def drop(self, request_id: str) -> None:
        """Forget a request, and ignore answers that are still to come."""
        number, _ = self._asked.pop(request_id, (None, None))
        if number is not None:
            self._client.drop_question(number)


def _usable(content: TurnContent, kept: KeptTurn, tokens: int) -> int:
    """Return how many tokens of a prompt a kept turn can provide: the common prefix, or 0 if it is too short.

    Args:
        content: digests of the prompt's content.
        kept: the peer's answer, with digests of the content that it keeps.
        tokens: length of the prompt in tokens.
    """
    # The engine always computes the last token of a prompt, to sample from it.
    shared = min(shared_tokens(content, kept), tokens - 1)
    return shared if shared >= kept.min_prefix_tokens else 0
