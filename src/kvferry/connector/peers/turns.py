"""Kept turns: blocks of finished requests, kept for the next turn of their conversation.

The prompt of the next turn begins with the tokens of the last prompt and answer. It goes to a prefill engine,
which has computed the last prompt but not the answer. The decode engine has the answer's KV. So it keeps the
blocks pinned in its pool under a lease (`TurnKeeper`), and the prefill engine finds them by their content
(`TurnFinder`, `transport.turns`). For the decode engine itself the request has ended. The lease ends when its
time is over, when a longer turn of the same conversation is kept, or when requests of this engine need the
blocks.

    kept ─all steps under way have ended─▶ published ─lease ends─▶ leaving ─all words raised─▶ freed
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from kvferry.common.errors import TransferError
from kvferry.connector.blocks import Transfer, TransferBook
from kvferry.connector.content import CHUNK_TOKENS, TurnNames
from kvferry.connector.engine import BlockIds, BlockPool, CacheGroup, EngineFacts, Request
from kvferry.geometry import GroupKind
from kvferry.planning.select import NULL_BLOCK, attends_to_all, first_independent
from kvferry.transport.control_client import ControlClient
from kvferry.transport.handshake import Address, Pending
from kvferry.transport.lease import LeaseBook
from kvferry.transport.messages import KeptTurn
from kvferry.transport.redeem import Grant, new_ticket
from kvferry.transport.turns import TurnContent, TurnIndex, shared_tokens

_FREE = 1 / 16
"""Share of free blocks in the pool below which kept turns are released."""


class BlocksWanted:
    """Computes how many KV blocks the largest waiting request needs."""

    def __init__(self, groups: Sequence[CacheGroup], tokens_in_flight: int) -> None:
        """Begin without requests, each of at most `tokens_in_flight` tokens scheduled but not computed."""
        self._groups, self._tokens_in_flight = tuple(groups), tokens_in_flight
        self._requests: dict[str, Request] = {}

    def add(self, request: Request) -> None:
        self._requests[request.request_id] = request

    def remove(self, request: Request) -> None:
        self._requests.pop(request.request_id, None)

    def blocks(self) -> int:
        """Return the number of blocks that the largest waiting request needs; 0 if none waits for blocks."""
        waiting = (one.num_tokens for one in self._requests.values() if one.needs_blocks)
        tokens = max(waiting, default=0)
        return sum(self._of_group(group, tokens) for group in self._groups) if tokens else 0

    def _of_group(self, group: CacheGroup, tokens: int) -> int:
        if not attends_to_all(group.kind):
            tokens = min(tokens, group.attention_span + self._tokens_in_flight + group.block_tokens)
        return 1 + -(-tokens // group.block_tokens)


def choose_leases_to_end(held: Mapping[str, int], lacking: int) -> list[str]:
    """Return the first leases that together hold at least `lacking` blocks; all if they hold fewer.

    >>> choose_leases_to_end({"a": 2, "b": 3, "c": 1}, 3), choose_leases_to_end({"a": 2}, 0)
    (['a', 'b'], [])
    """
    found = []
    for name, blocks in held.items():
        if lacking <= 0:
            break
        found.append(name)
        lacking -= blocks
    return found


@dataclass(slots=True, eq=False, kw_only=True)
class _Turn(Transfer):
    """A finished request's KV, kept for the next turn of its conversation.

    It is late from the end of its lease until all workers have confirmed the end: peers may still read.
    """

    content: TurnContent
    kept: KeptTurn  # reply to a peer that asks for the content


class TurnKeeper:
    """Keeps the blocks of finished requests. Only the engine's thread calls it."""

    def __init__(
        self,
        engine: EngineFacts,
        *,
        book: LeaseBook,
        names: TurnNames,
        wanted: BlocksWanted,
        seconds: float,
        share: float,
        index: TurnIndex,
        pool: BlockPool,
        workers: int,
    ) -> None:
        """Create a keeper without turns.

        Args:
            seconds: maximum age of a turn; 0 to keep none.
            share: maximum part of the block pool that turns may pin, from 0 to 1.
        """
        self._engine = engine
        self._book, self._names, self._wanted = book, names, wanted
        self._seconds, self._most = seconds, int(share * engine.num_blocks)
        self._least_free = int(_FREE * engine.num_blocks)
        self._turns: dict[str, _Turn] = {}
        self._blocks = 0  # of all turns
        # Number of the step after which peers may find a turn, by lease, ascending; until they may.
        self._unpublished: dict[str, int] = {}
        self._step = 0
        # Leases of the turns whose last whole chunk has this key.
        self._by_key: dict[bytes, dict[str, None]] = {}
        self._over: list[str] = []
        self._index, self._pool, self._workers = index, pool, workers
        self._pins = TransferBook[_Turn](workers, pool)

    def __contains__(self, lease: str) -> bool:
        """Return True if a lease belongs to a turn."""
        return lease in self._turns

    @property
    def busy(self) -> bool:
        """True if the engine must run steps without requests, to publish turns and to free their blocks."""
        return bool(self._over) or self.holds_blocks or bool(self._unpublished)

    @property
    def holds_blocks(self) -> bool:
        """True if blocks of ended turns will soon be free, so that the engine should wait and not preempt."""
        return self._pins.late_blocks() > 0

    def finished(self, request: Request, block_ids: BlockIds) -> int:
        """Keep the blocks of a finished request, if a peer can use them and they fit in the turns' share.

        Withdraw the earlier turns that the request continues. Return the number of kept tokens; 0 if none.
        """
        if not self._seconds:
            return 0
        tokens = self._computed_tokens(request)
        content = self._names.content(request, tokens) if tokens else None
        if content is None or not content.keys:
            return 0
        offered = self._engine.tables(block_ids, tokens)
        least = self._shortest_usable_prefix(offered, tokens)
        blocks = [self._pool.blocks[number] for ids in offered for number in ids if number != NULL_BLOCK]
        if least is None or len(blocks) > self._most:
            return 0
        try:
            word = self._book.grant(request.request_id, self._seconds)
        except TransferError:
            return 0
        turn = _Turn(
            key=request.request_id,
            holder="turns",
            blocks=blocks,
            content=content,
            kept=KeptTurn(
                engine_id=self._engine.engine_id,
                ticket=new_ticket(),
                grant=Grant.of(word, tokens, offered),
                min_prefix_tokens=least,
                chunks=0,
                next_tokens=[],
            ),
        )
        self._pins.begin(turn)
        self._over += self._earlier_turns(content)
        self._turns[turn.key] = turn
        self._blocks += len(blocks)
        self._by_key.setdefault(content.keys[-1], {})[turn.key] = None
        # With steps in flight a request can end before its last forward pass has run.
        self._unpublished[turn.key] = self._step + 1 + self._engine.steps_in_flight
        return tokens

    def _earlier_turns(self, content: TurnContent) -> list[str]:
        """Return the leases of the turns that a content continues."""
        return [
            name
            for key in content.keys
            for name in self._by_key.get(key, ())
            if content.begins_with(self._turns[name].content)
        ]

    def step(self) -> list[str]:
        """Publish the turns to whose blocks no step can write any more. Call this once per engine step.

        Return the leases that must end, of turns that are withdrawn, continued, or in the way.
        """
        self._step += 1
        while self._unpublished and self._unpublished[lease := next(iter(self._unpublished))] <= self._step:
            del self._unpublished[lease]
            turn = self._turns[lease]
            self._index.publish(turn.content, turn.kept, lease)
        over, self._over = self._over, []
        return over + self._leases_to_end_early(over)

    def give_up(self) -> None:
        """Withdraw all turns. Their leases end with the next step."""
        self._over = list(self._turns)
        self._unpublished.clear()
        for turn in self._turns.values():
            self._index.withdraw(turn.kept.ticket)

    def ended(self, lease: str) -> None:
        """Withdraw the turn of an ended lease, if any. Its blocks stay pinned until `on_words_raised`."""
        if (turn := self._turns.pop(lease, None)) is None:
            return
        self._unpublished.pop(lease, None)
        self._blocks -= len(turn.blocks)
        key = turn.content.keys[-1]
        del self._by_key[key][lease]
        if not self._by_key[key]:
            del self._by_key[key]
        self._index.withdraw(turn.kept.ticket)
        self._pins.mark_late(turn)

    def on_words_raised(self, lease: str) -> None:
        """Unpin the blocks of an ended turn, because all workers have raised its lease word."""
        self._pins.end(lease, self._workers)

    def _leases_to_end_early(self, over: Collection[str]) -> list[str]:
        """Return the leases that must end early, the oldest first. Those in `over` end anyway.

        Turns may pin a share of the pool. They must leave the share `_FREE` of it, and the blocks that the
        largest waiting request needs.
        """
        leaving = {name: len(self._turns[name].blocks) for name in over if name in self._turns}
        held = self._blocks - sum(leaving.values())
        if not held:
            return []
        # Blocks of the turns that are leaving, or will, are as good as free.
        free = self._pool.get_num_free_blocks() + self._pins.pinned - held
        room = min(self._most - held, free - max(self._least_free, self._wanted.blocks()))
        if room >= 0:
            return []
        rest = {name: len(turn.blocks) for name, turn in self._turns.items() if name not in leaving}
        return choose_leases_to_end(rest, -room)

    def _computed_tokens(self, request: Request) -> int:
        """Return how many tokens a finished request's blocks certainly hold KV of; 0 if that is unknown."""
        if not request.is_complete:
            return 0
        computed, tokens = request.num_computed_tokens, request.num_tokens
        if computed < tokens - 1:
            # Preempted while its last step was in flight: the blocks are new ones, only partly computed.
            return 0
        if not self._engine.has_state:
            # The last token was sampled, but no step has computed its KV.
            return tokens - 1
        # State serves one position only, and with drafts that position is not certain.
        return 0 if self._engine.speculates or computed > tokens else computed

    def _shortest_usable_prefix(self, tables: Sequence[Sequence[int]], tokens: int) -> int | None:
        """Return the length in tokens of the shortest prefix that a peer can use; None if there is none."""
        least = 1
        for group, ids in zip(self._engine.groups, tables, strict=True):
            if group.kind is GroupKind.STATE:
                # The state is that of one position, the end. Without it, no prefix can be used.
                least = max(least, tokens if ids[0] != NULL_BLOCK else tokens + 1)
                continue
            whole = list(ids[: -(-tokens // group.block_tokens)])
            gone = len(whole) - whole[::-1].index(NULL_BLOCK) if NULL_BLOCK in whole else 0
            # Every prefix needs the freed blocks. In a windowed group, prefixes that end late enough do not.
            if gone and attends_to_all(group.kind):
                return None
            if gone:
                least = max(least, first_independent(group, gone * group.block_tokens))
        return least if least <= tokens else None


# The number of a question to peers, and the content of the prompt that is asked for.
TurnSearch: TypeAlias = tuple[int, TurnContent]


class TurnFinder:
    """Asks peers for earlier turns of conversations. Only the engine's thread calls it."""

    def __init__(
        self, client: ControlClient, keepers: Callable[[], Mapping[Address, int]], names: TurnNames
    ) -> None:
        """Create a finder. `keepers` returns the incarnation of each peer that keeps turns, by address."""
        self._client, self._keepers, self._names = client, keepers, names

    def ask(self, request: Request) -> TurnSearch | None:
        """Ask peers for an earlier turn of a request's conversation; return None if none can be asked."""
        keepers = self._keepers()
        # Turns are found by keys of whole chunks, and the last token of a prompt is always computed.
        if not keepers or request.num_tokens <= CHUNK_TOKENS:
            return None
        content = self._names.content(request, request.num_tokens)
        if content is None or (number := self._client.ask_turn(keepers, content)) is None:
            return None
        return number, content

    def found(self, request: Request, search: TurnSearch) -> tuple[int, Address, KeptTurn] | Pending | None:
        """Return the turn that shares the most tokens with a prompt; None if no peer has one.

        It returns Pending while peers have not answered, and then ends the search. A turn is (number of
        usable tokens, from the start of the prompt; peer's address; its answer, with tables and lease).
        """
        number, content = search
        answers = self._client.turns(number)
        if answers is None:
            return Pending()
        best = None
        for address, kept in answers:
            # The engine always computes the last token of a prompt, to sample from it.
            tokens = min(shared_tokens(content, kept), request.num_tokens - 1)
            if tokens >= max(kept.min_prefix_tokens, 1) and (best is None or tokens > best[0]):
                best = tokens, address, kept
        return best

    def drop(self, search: TurnSearch) -> None:
        """Ignore answers that are still to come."""
        self._client.drop_question(search[0])
