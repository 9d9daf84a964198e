"""Engines read with sealed grants before the producer hears of it, and the lease word alone decides."""

from __future__ import annotations

from typing import Any

import pytest

from kvferry.connector.events import LeaseEnded, LoadEnded
from support.clock import Clock
from support.mesh import MeshEngine, Network, network
from support.vllm_cache import BLOCK

LEASE, BLOCKS = 30.0, 12
TEXT = range(4 * BLOCK)


def engines(net: Network, count: int = 2) -> list[MeshEngine]:
    return [MeshEngine(net, f"e{number}", BLOCKS, lease_seconds=LEASE) for number in range(count)]


def offered(producer: MeshEngine, name: str = "p0", text: Any = TEXT) -> dict[str, Any]:
    producer.add(name, text, 1, {"do_remote_decode": True})
    while (offer := producer.offer_of(name)) is None:
        producer.step()
    return offer


def answer(consumer: MeshEngine, offer: dict[str, Any], name: str = "c0", text: Any = TEXT) -> None:
    consumer.add(name, text, 1, offer)
    while name not in consumer.answered:
        consumer.step()


def loads(consumer: MeshEngine) -> list[str]:
    """Why each load failed; empty for those that did not."""
    return [event.failure for event in consumer.told if isinstance(event, LoadEnded)]


def test_two_engines_read_with_one_sealed_grant_and_the_lease_ends_with_the_last():
    with network(Clock()) as net:
        producer, *consumers = engines(net, 3)
        offer = offered(producer)
        for number, consumer in enumerate(consumers):
            consumer.add(f"c{number}", TEXT, 1, offer)
            consumer.step()
        for client in net.clients:
            client.beat()
        for number, consumer in enumerate(consumers):
            while f"c{number}" not in consumer.answered:
                consumer.step()
            producer.step()
            ends = [event for event in producer.told if isinstance(event, LeaseEnded)]
            assert len(ends) == number, "claimed by the other one"
        assert [loads(one) for one in consumers] == [[""], [""]]
        assert net.opened == 2


@pytest.mark.parametrize("how", ["expired", "reset"])
def test_a_sealed_grant_whose_blocks_have_another_owner_is_read_in_vain(how):
    with network(Clock()) as net:
        producer, consumer = engines(net)
        offer = offered(producer)
        if how == "expired":
            net.clock.now += LEASE + 1
        else:
            producer.connector.half.reset()
        producer.step()
        producer.step()
        producer.add("p1", range(1000, 1000 + (BLOCKS - 3) * BLOCK), 9, None)
        for _ in range(4):
            producer.step()
        assert producer.pool.get_num_free_blocks() < 4, "the blocks of the first prompt are among them"
        answer(consumer, offer)
        assert net.opened == 1
        assert loads(consumer) == ["the lease has ended"]


def test_a_sealed_grant_is_used_once_by_an_engine():
    with network(Clock()) as net:
        producer, consumer = engines(net)
        offer = offered(producer)
        answer(consumer, offer)
        assert consumer.scheduler.reset_prefix_cache()
        answer(consumer, offer, "c1")
        assert loads(consumer) == [""], "the producer was asked, and refused"
