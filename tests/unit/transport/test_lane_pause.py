"""A lane sleeps while it waits for READs and for replies."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest
import zmq

from kvferry.transport import lane as lane_module
from kvferry.transport.lane import Lane

NAP = 2e-4


@pytest.fixture
def sockets():
    with zmq.Context() as context, context.socket(zmq.PAIR) as here, context.socket(zmq.PAIR) as there:
        here.bind("inproc://replies")
        there.connect("inproc://replies")
        yield here, there


def lane(awaited, *, in_flight: bool) -> SimpleNamespace:
    segmented = SimpleNamespace(awaited=None, in_flight=in_flight)
    plan = SimpleNamespace(segmented=[segmented], verifications=[SimpleNamespace(awaited=awaited)])
    return SimpleNamespace(_reads=[SimpleNamespace(plan=plan, handles=[])])


@pytest.mark.parametrize("in_flight", [True, False])
def test_it_sleeps_while_no_reply_comes(sockets, in_flight):
    began = time.perf_counter()
    for _ in range(20):
        Lane._pause(lane(sockets[0], in_flight=in_flight), NAP)
    assert time.perf_counter() - began >= 20 * NAP


def test_a_reply_wakes_it_up_if_nothing_is_in_flight(sockets, monkeypatch):
    monkeypatch.setattr(lane_module, "_LONGEST_WAIT", 60.0)
    here, there = sockets
    there.send(b"digest")
    began = time.perf_counter()
    Lane._pause(lane(here, in_flight=False), NAP)
    assert time.perf_counter() - began < 30.0
