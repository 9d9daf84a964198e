"""Look-up of earlier turns of a request's conversation at peers.

A *turn* is a finished request's KV, which the engine that decoded it keeps for the next turn of its
conversation. A peer that keeps turns says so when it first reads from this engine. When a request arrives
without a ticket, all such peers are asked. The turn that shares most tokens with the prompt is used. The
peer's answer already contains the grant: the block tables and the lease word.
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
    """KV of an earlier request that a peer keeps, and that a new prompt can use from its start.

    Attributes:
        tokens: number of usable tokens, from the start of the prompt.
        address: address (host, port) of the peer's control channel.
        kept: the peer's answer, with the block tables and the lease.
    """

    tokens: int
    address: Address
    kept: KeptTurn


class TurnFinder:
    """Asks peers for KV that they keep of earlier turns of conversations.

    Only the engine's thread calls the methods.
    """

    def __init__(
        self, client: ControlClient, keepers: Callable[[], Mapping[Address, int]], names: TurnNames
    ) -> None:
        """Create a finder that has sent no questions to peers yet.

        Args:
            client: control channel to the peers.
            keepers: function that returns the peers that keep KV of finished requests, as a mapping from
                address to the random number that identifies the peer's run (incarnation).
            names: object that computes digests of token content. Peers look up the KV that they keep by these
                digests.
        """
        self._client, self._keepers, self._names = client, keepers, names
        self._asked: dict[str, tuple[int, TurnContent]] = {}

    def __contains__(self, request_id: str) -> bool:
        """Return True if peers were asked for this request and `found` has not returned the result yet."""
        return request_id in self._asked

    def ask(self, request: Request) -> bool:
        """Ask peers whether they keep KV of an earlier turn of a new request's conversation.

        Return True if any peer was asked. `found` then returns the result. No peer is asked, for example, if
        the prompt is too short or no peer keeps such KV.
        """
        keepers = self._keepers()
        if not keepers or request.num_tokens <= CHUNK_TOKENS:
            return False
        content = self._names.content(request, request.num_tokens)
        if content is None or (number := self._client.ask_turn(keepers, content)) is None:
            return False
        self._asked[request.request_id] = number, content
        return True

    def found(self, request: Request) -> FoundTurn | Pending | None:
        """Return the kept KV of the earlier turn that shares the most tokens with a request's prompt.

        Return None if no peer has usable KV, and Pending while peers have not answered. Call it only for
        requests for which `ask` returned True.
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
        """Forget a request. If peers have not answered the question about it yet, ignore their answers."""
        number, _ = self._asked.pop(request_id, (None, None))
        if number is not None:
            self._client.drop_question(number)


def _usable(content: TurnContent, kept: KeptTurn, tokens: int) -> int:
    """Return how many tokens of a prompt the KV that a peer keeps can provide.

    These are the tokens that the prompt and the kept KV have in common from the start. The last token of the
    prompt is not counted, because the engine always computes it. Return 0 if the common prefix is shorter
    than the shortest prefix that the peer can still serve.

    Args:
        content: digests of the prompt's content.
        kept: the peer's answer, with digests of the content that it keeps.
        tokens: length of the prompt in tokens.
    """
    shared = min(shared_tokens(content, kept), tokens - 1)
    return shared if shared >= kept.min_prefix_tokens else 0
