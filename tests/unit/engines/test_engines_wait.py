"""Engines that keep KV for each other never wait for each other for ever. Over vLLM's scheduler.

Each engine has a small pool, and offers KV to the others. In every case all requests must end.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given, strategies as st

from kvferry.connector.events import SourceRefused
from kvferry.connector.peers.peering import _Standstill
from support.clock import Clock
from support.examples import examples
from support.mesh import MeshEngine, Network, network
from support.vllm_cache import BLOCK

pytestmark = pytest.mark.slow

PATIENCE, LEASE, TICK = 10.0, 40.0, 0.5
BLOCKS = 13
"""Blocks of a pool, of which vLLM keeps one for itself."""


@dataclass(frozen=True)
class Prompt:
    """A prompt that one engine computes and another one continues.

    Attributes:
        tokens: its length.
        producer, consumer: index of each engine; they may be the same.
        at_once: whether a router asks both engines at once.
        answer: tokens of the answer.
        delay: ticks from the start until the request comes.
    """

    tokens: int
    producer: int
    consumer: int
    at_once: bool = False
    answer: int = 2
    delay: int = 0


def ticks_until_all_end(net: Network, engines: list[MeshEngine], prompts: list[Prompt], most: int) -> int:
    """Serve prompts as a router does. Return the number of ticks; fail if it exceeds `most`."""
    waiting = dict(enumerate(prompts))
    for tick in range(most):
        for number, one in enumerate(prompts):
            text = range(1000 * number, 1000 * number + one.tokens)
            producer, consumer = engines[one.producer], engines[one.consumer]
            if tick == one.delay:
                ticket = {"remote_request_id": secrets.token_hex(16)} if one.at_once else {}
                producer.add(f"p{number}", text, 1, {"do_remote_decode": True, **ticket})
                if one.at_once:
                    offer = producer.offer_at_once(ticket["remote_request_id"])
                    consumer.add(f"c{number}", text, one.answer, offer)
                    waiting.pop(number)
            elif number in waiting and (offer := producer.offer_of(f"p{number}")) is not None:
                consumer.add(f"c{number}", text, one.answer, offer)
                waiting.pop(number)
        for engine in engines:
            engine.step()
        net.clock.now += TICK
        if tick * TICK % (LEASE / 4) == 0:
            for client in net.clients:
                client.beat()
        if not waiting and all(
            f"c{number}" in engines[one.consumer].answered for number, one in enumerate(prompts)
        ):
            return tick
    pytest.fail(f"requests wait for ever: {[list(engine.scheduler.requests) for engine in engines]}")


def given_up(engines: list[MeshEngine]) -> list[str]:
    """Reasons of all claims that were given up."""
    told = [event for engine in engines for event in engine.told if isinstance(event, SourceRefused)]
    return [event.reason for event in told if "the claim is given up" in event.reason]


def circle(engines: int, prompts: int = 4, tokens: int = 4 * BLOCK + 1) -> list[Prompt]:
    """Prompts that fill every engine's pool for the next engine."""
    return [Prompt(tokens, one, (one + 1) % engines) for _ in range(prompts) for one in range(engines)]


def meshed(net: Network, pools: Sequence[int], **settings: Any) -> list[MeshEngine]:
    """Engines with so many blocks each."""
    return [
        MeshEngine(net, f"e{number}", blocks, lease_seconds=LEASE, **settings)
        for number, blocks in enumerate(pools)
    ]


@pytest.mark.parametrize("prefix_caching", [True, False], ids=["prefix cache", "no prefix cache"])
@pytest.mark.parametrize("engines", [1, 2, 3, 4])
def test_a_circle_of_full_engines_goes_on_after_the_patience(engines, prefix_caching):
    with network(Clock()) as net:
        mesh = meshed(net, [BLOCKS] * engines, prefix_caching=prefix_caching)
        ticks = ticks_until_all_end(net, mesh, circle(engines), 200)
        assert given_up(mesh)
        assert ticks * TICK < 4 * PATIENCE


@pytest.mark.parametrize("engines", [1, 2])
def test_engines_without_the_rule_wait_for_ever(engines, monkeypatch):
    monkeypatch.setattr(_Standstill, "claim_lapses", lambda *_, **__: False)
    with network(Clock()) as net:
        mesh = meshed(net, [BLOCKS] * engines)
        with pytest.raises(pytest.fail.Exception, match="for ever"):
            ticks_until_all_end(net, mesh, circle(engines), 400)


def test_an_engine_that_runs_no_steps_keeps_no_blocks_of_another():
    with network(Clock()) as net:
        producer, consumer = meshed(net, [BLOCKS] * 2)
        free = producer.pool.get_num_free_blocks()
        producer.add("p0", range(4 * BLOCK), 1, {"do_remote_decode": True})
        while (offer := producer.offer_of("p0")) is None:
            producer.step()
        consumer.add("c0", range(4 * BLOCK), 1, offer)
        held = []
        for tick in range(int(7 * LEASE)):
            producer.step()
            net.clock.now += 1.0
            if tick % (LEASE / 4) == 0:
                for client in net.clients:
                    client.beat()
            held.append(producer.pool.get_num_free_blocks() < free)
        assert all(held[: int(4 * LEASE)])
        assert not any(held[int(6 * LEASE) :])
        while "c0" not in consumer.answered:
            consumer.step()


def test_a_decode_engine_whose_requests_wait_for_their_turn_gives_up_nothing():
    with network(Clock()) as net:
        mesh = meshed(net, [BLOCKS] * 2)
        prompts = [Prompt(4 * BLOCK, 0, 1, answer=120) for _ in range(4)]
        ticks = ticks_until_all_end(net, mesh, prompts, 2000)
        assert ticks * TICK > 2 * PATIENCE, "they had to wait"
        assert net.opened == len(prompts), "their grants came sealed"
        assert not given_up(mesh)


@given(
    pools=st.lists(st.integers(BLOCKS, 2 * BLOCKS), min_size=1, max_size=4),
    turns=st.sampled_from([0.0, 60.0]),
    data=st.data(),
)
@examples(30)
def test_all_requests_end_whatever_engines_ask_each_other(pools, turns, data):
    index = st.integers(0, len(pools) - 1)
    prompt = st.builds(
        Prompt,
        tokens=st.integers(2, 8 * BLOCK),
        producer=index,
        consumer=index,
        at_once=st.booleans(),
        answer=st.integers(1, 40),
        delay=st.integers(0, 40),
    )
    prompts = data.draw(st.lists(prompt, min_size=1, max_size=16))
    with network(Clock()) as net:
        ticks_until_all_end(net, meshed(net, pools, turn_seconds=turns), prompts, 1000)
