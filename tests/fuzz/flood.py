"""Floods of a producer and a consumer, beside an honest peer: what they cost, and how it is served.

    python tests/fuzz/flood.py [seconds of each flood]

One process has both ends under attack, so its memory, threads, descriptors and log are all that grows. The
attackers and the honest peer are processes of their own.
"""

from __future__ import annotations

import logging
import multiprocessing
import socket
import statistics
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from fuzz.judge import descriptors, memory
from fuzz.rigs import HOST, Rig, meet
from fuzz.seeds import requests
from kvferry.connector.events import EventStream
from kvferry.observe.traces import TraceBuffer
from kvferry.transport.messages import MAX_REQUEST_BYTES, MAX_TICKETS, Claim, encode


class Bytes(logging.Handler):
    """Counts the bytes of a log."""

    count = 0

    def emit(self, record: logging.LogRecord) -> None:
        """Count one record."""
        self.count += len(self.format(record)) + 1


def connect_and_wait(keys: Any, port: int, stop: Any) -> None:
    """Strangers: open connections, say nothing or garbage, never end them."""
    held: list[socket.socket] = []
    while not stop.is_set():
        one = socket.socket()
        one.settimeout(0.2)
        try:
            one.connect((HOST, port))
            if len(held) % 2:
                one.sendall(b"\xff" + bytes(8) + b"\x7f\x03\x01CURVE" + bytes(47))
        except OSError:
            pass
        held.append(one)
        if len(held) > 6000:
            held.pop(0).close()


def fill_frames(keys: Any, port: int, stop: Any) -> None:
    """Strangers: send on each connection a frame as long as a message may be, but for its end."""
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"CURVE".ljust(20, b"\0") + bytes(32)
    frame = b"\x06" + MAX_REQUEST_BYTES.to_bytes(8, "big") + bytes(MAX_REQUEST_BYTES - 100)
    held: list[socket.socket] = []
    while not stop.is_set():
        one = socket.socket()
        one.settimeout(0.5)
        with suppress(OSError):
            one.connect((HOST, port))
            one.sendall(greeting + frame)
        held.append(one)
        if len(held) > 2000:
            held.pop(0).close()


def talk(keys: Any, port: int, stop: Any, say: Callable[[int], bytes]) -> None:
    """Say messages on a channel of somebody with the key, as fast as they go."""
    with ExitStack() as stack:
        rig = Rig(stack)
        rig.keys = keys
        liar, number = rig.socket(port), 0
        liar.sndhwm = 100
        while not stop.is_set():
            number += 1
            if liar.poll(50, 2):
                liar.send(say(number))
            while liar.poll(0):
                liar.recv()


def handshakes(keys: Any, port: int, stop: Any) -> None:
    """Ask for ranks again and again, as fast as answers come."""
    said = requests()
    talk(keys, port, stop, lambda number: said[number % 3])


def garbage(keys: Any, port: int, stop: Any) -> None:
    """Say what is no message."""
    talk(keys, port, stop, lambda number: b"\xc1" * (number % 5000))


def heartbeats(keys: Any, port: int, stop: Any) -> None:
    """Keep as many leases alive as a message holds, none of which exists."""
    beat = encode(Claim(7, [number.to_bytes(16, "big") for number in range(MAX_TICKETS)]))
    talk(keys, port, stop, lambda number: beat)


def honest(keys: Any, port: int, stop: Any, told: Any) -> None:
    """Shake hands again and again; tell how long each took."""
    with ExitStack() as stack:
        rig = Rig(stack)
        rig.keys = keys
        client = rig.client(20.0)
        while not stop.is_set():
            told.put(meet(client, port))
            time.sleep(0.05)


def made_up_addresses(client: Any, stop: threading.Event) -> None:
    """Look up addresses that nobody has, as offers of clients would name them."""
    number = 0
    while not stop.is_set():
        number += 1
        client.look_up((f"127.{number // 62500 % 250}.{number // 250 % 250}.{number % 250 + 1}", 9), number)
        if number % 10 == 0:
            time.sleep(0.001)


def refused_requests(_: Any, stop: threading.Event) -> None:
    """Refuse requests with ids of a megabyte, with traces of the last thousand."""
    events, number, long = EventStream(TraceBuffer(1000)), 0, "x" * (1 << 20)
    while not stop.is_set():
        number += 1
        events.refuse(f"{long}{number}", f"{long}@10.0.0.1:{number}", f"{long} {number}")
        time.sleep(0.002)


def begun(ready: Any, target: Callable[..., None], *args: Any) -> None:
    """Run a target in a process of its own, once everything has been imported."""
    ready.release()
    target(*args)


def row(name: str, rig: Rig, server: Any, client: Any, attack: Any, seconds: float, log: Bytes) -> None:
    """Run one flood, and print what it cost."""
    spawn = multiprocessing.get_context("spawn")
    stop, told, ended = spawn.Event(), spawn.Queue(), threading.Event()
    ready = spawn.Semaphore(0)
    others = [spawn.Process(target=begun, args=(ready, honest, rig.keys, server.port, stop, told))]
    inside: list[threading.Thread] = []
    if attack in (made_up_addresses, refused_requests):
        inside.append(threading.Thread(target=attack, args=(client, ended)))
    elif attack is not None:
        others.append(spawn.Process(target=begun, args=(ready, attack, rig.keys, server.port, stop)))
    before, said = memory(), log.count
    for one in others:
        one.start()
    for _ in others:
        ready.acquire()
    for thread in inside:
        thread.start()
    most = [0, 0, 0, 0]
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        time.sleep(0.2)
        while server.events:
            server.events.popleft()
        now = memory(), threading.active_count(), descriptors(), server.connections
        most = [max(a, b) for a, b in zip(most, now, strict=True)]
    stop.set()
    ended.set()
    took = []
    while not told.empty():
        took.append(told.get())
    for one in (*others, *inside):
        one.join(30)
    took = sorted(took) or [float("nan")]
    print(
        f"{name:<28}{(most[0] - before) / 2**20:>9.1f}"
        f"{most[1]:>9}{most[2]:>13}{most[3]:>13}{log.count - said:>11}"
        f"{len(took):>11}{statistics.median(took) * 1e3:>10.1f}{took[-1] * 1e3:>10.1f}",
        flush=True,
    )


def main() -> None:
    """Print a line for every flood."""
    seconds = float(sys.argv[1]) if len(sys.argv) > 1 else 10.0
    log = Bytes()
    logging.getLogger("kvferry").addHandler(log)
    logging.getLogger("kvferry").propagate = False
    print(f"floods of {seconds:g} s, one attacker each; handshakes of an honest peer in ms")
    print(
        f"{'flood':<28}{'MiB more':>9}{'threads':>9}{'descriptors':>13}{'connections':>13}{'log bytes':>11}"
        f"{'handshakes':>11}{'median':>10}{'slowest':>10}"
    )
    with ExitStack() as stack:
        rig = Rig(stack)
        server, client = rig.server(), rig.client(1.0)
        for name, attack in {
            "none": None,
            "strangers connect": connect_and_wait,
            "strangers fill frames": fill_frames,
            "garbage with the key": garbage,
            "handshakes with the key": handshakes,
            f"heartbeats of {MAX_TICKETS} leases": heartbeats,
            "made-up addresses": made_up_addresses,
            "refused requests of 1 MiB": refused_requests,
            "none, afterwards": None,
        }.items():
            row(name, rig, server, client, attack, seconds, log)


if __name__ == "__main__":
    main()
