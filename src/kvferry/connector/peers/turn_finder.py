"""Look-up of earlier turns of a request's conversation at peers.

A peer that keeps turns says so when it first reads from this engine. When a request arrives without a ticket,
all such peers are asked. The turn that shares most tokens with the prompt is used. The peer's answer already
contains the grant.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from kvferry.connector.engine import Request
from kvferry.connector.peers.turn_names import CHUNK_TOKENS, TurnNames
from kvferry.transport.control_client import ControlClient
from kvferry.transport.handshake import Address, Pending
from kvferry.transport.messages import KeptTurn
from kvferry.transport.turns import TurnContent, shared_tokens


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
