"""Asks peers for earlier turns of a conversation that a request goes on with.

A request that came without a ticket may go on with what another engine has computed: the answer of the last
turn, where it was decoded. Peers that keep such blocks have said so when they first read from here. All of
them are asked as the request comes in, and what shares most is taken. Its grant comes with the answer.
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
    """An earlier turn with which a prompt can go on.

    Attributes:
        tokens: from the start of the prompt.
        address: of the peer that keeps it.
        kept: what the peer says of it.
    """

    tokens: int
    address: Address
    kept: KeptTurn


class TurnFinder:
    """Looks for earlier turns at peers. Only the engine's thread calls it."""

    def __init__(
        self, client: ControlClient, keepers: Callable[[], Mapping[Address, int]], names: TurnNames
    ) -> None:
        """Begin without questions.

        Args:
            client: to the peers.
            keepers: those that keep earlier turns, each with its run.
            names: what prompts hold.
        """
        self._client, self._keepers, self._names = client, keepers, names
        self._asked: dict[str, tuple[int, TurnContent]] = {}

    def __contains__(self, request_id: str) -> bool:
        """Return whether peers were asked for this request, and `found` has not taken their answers yet."""
        return request_id in self._asked

    def ask(self, request: Request) -> bool:
        """Ask the peers that may keep an earlier turn of a new request; return whether there are any."""
        keepers = self._keepers()
        if not keepers or request.num_tokens <= CHUNK_TOKENS:
            return False
        content = self._names.content(request, request.num_tokens)
        if content is None or (number := self._client.ask_turn(keepers, content)) is None:
            return False
        self._asked[request.request_id] = number, content
        return True

    def found(self, request: Request) -> FoundTurn | Pending | None:
        """Take the peers' answers: the turn that shares most tokens, None if none does, or still pending."""
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
        """Forget a request."""
        number, _ = self._asked.pop(request_id, (None, None))
        if number is not None:
            self._client.drop_question(number)


def _usable(content: TurnContent, kept: KeptTurn, tokens: int) -> int:
    """Return the tokens of a turn that a prompt can use, which computes its last token itself."""
    shared = min(shared_tokens(content, kept), tokens - 1)
    return shared if shared >= kept.least else 0
