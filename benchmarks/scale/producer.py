"""A producer without an engine: it retains the blocks of finished prompts for other engines.

`kvferry.connector.peers.producer.Producer` is the real one, with lease book, tickets and a queue of messages
from consumers. Its messages are passed by calls, without sockets.
"""

from __future__ import annotations

from typing import Any

from benchmarks.no_blocks import NoBlocks
from kvferry.common.errors import TransferError
from kvferry.connector.config import ConnectorConfig
from kvferry.connector.content import Adapters, TurnNames, content_of
from kvferry.connector.engine import CacheGroup, EngineFacts, PlainRequest, PlainStep
from kvferry.connector.events import EventStream
from kvferry.connector.messages import StepOrders
from kvferry.connector.peers.producer import Producer
from kvferry.geometry import GroupKind
from kvferry.observe.metrics_listener import MetricsListener
from kvferry.transport.control_server import ControlServer, LeaseClaims
from kvferry.transport.messages import Facts, PeerInfo
from kvferry.transport.offer import read_offer
from kvferry.transport.redeem import NotRedeemed, Redeem, Redeemed, Unchanged
from kvferry.transport.security import random_keys

BLOCK_TOKENS = 16
_CONSUMER = 7
_HOST = "127.0.0.1"
_WANTS_OFFER = {"do_remote_decode": True, "do_remote_prefill": False}


class RetainingProducer:
    """A producer of prompts of one length, driven as an engine and a consumer drive it."""

    def __init__(self, tokens: int, lease_seconds: float = 3600.0) -> None:
        """Start the producer, and the control channel that holds its tickets.

        Args:
            tokens: length of each prompt, in tokens.
            lease_seconds: seconds until an unclaimed lease expires.
        """
        adapters = Adapters()
        engine = EngineFacts(
            engine_id="bench-producer",
            groups=(CacheGroup(kind=GroupKind.FULL, attention_span=0, block_tokens=BLOCK_TOKENS),),
            num_blocks=1 << 20,
            longest_request=1 << 21,
            steps_in_flight=1,
            tokens_in_flight=8192,
            step_tokens=8192,
        )
        facts = Facts(engine.engine_id, 1, "kvferry bench", {})
        self._server = ControlServer(_HOST, 0, PeerInfo(facts, ()), random_keys())
        self._producer = Producer(
            engine,
            ConnectorConfig(lease_seconds=lease_seconds),
            incarnation=1,
            events=EventStream(MetricsListener()),
            names=TurnNames(adapters),
            adapters=adapters,
            channel=self._server,
            pool=NoBlocks(),
            workers=1,
        )
        self._tokens, self._prompt = tokens, list(range(1, tokens + 2))
        self._table = list(range(1, 1 + -(-tokens // BLOCK_TOKENS)))
        request = PlainRequest(request_id="", prompt_token_ids=self._prompt)
        self._content = content_of(request, tokens, adapters)
        self._messages = 0
        self._steps = 0

    def retain(self, name: str) -> dict[str, Any]:
        """End a request whose KV another engine will read. Return the offer, its ``kv_transfer_params``.

        Args:
            name: id of the request.

        Raises:
            TransferError: the producer retains as many requests as it can.
        """
        request = PlainRequest(
            request_id=name, prompt_token_ids=self._prompt, kv_transfer_params=_WANTS_OFFER, is_complete=True
        )
        self._producer.on_new_request(request)
        request.num_computed_tokens = request.num_prompt_tokens
        hold, offer = self._producer.finished(request, (self._table,))
        if not hold or offer is None:
            raise TransferError(f"the producer does not retain request {name}; measure fewer requests")
        return offer

    def redeem(self, offer: dict[str, Any]) -> Redeemed | Unchanged | NotRedeemed:
        """Redeem the ticket of an offer, and return the reply."""
        ticket, self._messages = _ticket(offer), self._messages + 1
        reply = self._server.tickets.redeem(
            Redeem(self._messages, _CONSUMER, ticket, self._tokens, self._content)
        )
        claimed = LeaseClaims(self._server.tickets.claimed(_CONSUMER, [ticket]))
        self._server.events.put(b"", claimed)
        return reply

    def release(self, offer: dict[str, Any]) -> None:
        """Release the lease of an offer. `step` ends the lease."""
        leases = self._server.tickets.release(_CONSUMER, [_ticket(offer)])
        self._server.events.put(b"", LeaseClaims(leases, released=True), force=True)

    def step(self) -> int:
        """Run one step of the scheduler without tokens. Return the number of leases that end in it.

        The workers confirm at once that they have raised the words of these leases.
        """
        orders = StepOrders()
        self._producer.take_events(self._server.events, orders)
        self._steps += 1
        self._producer.scheduled(self._steps, _EMPTY, _no_blocks)
        self._producer.sent(set(orders.ended))
        self._producer.step_done(self._steps)
        return len(orders.ended)

    def close(self) -> None:
        """Close the control channel."""
        self._server.close()


_EMPTY = PlainStep(tokens={})


def _no_blocks(name: str) -> tuple[list[int], ...]:
    raise NotImplementedError(f"request {name} is not in the step")


def _ticket(offer: dict[str, Any]) -> bytes:
    found = read_offer(offer)
    if found is None:
        raise TransferError("a producer offers nothing")
    return bytes.fromhex(found.remote_request_id)
