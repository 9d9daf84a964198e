"""Faults that are injected inside an engine's process, by replacing methods of its own objects.

A fault is *armed*, for one request or for the next so many events, and counted when it takes place.
"""

from __future__ import annotations

import random
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import zmq

from kvferry.common.errors import ProtocolError
from kvferry.transport import control_client
from kvferry.transport.gather_client import Gathered
from kvferry.transport.handshake import Pending, Unusable
from kvferry.transport.messages import Claim
from kvferry.transport.seal import SealBinding
from kvferry.transport.staging import UNIT_BYTES
from support.vllm_engine import on_the_way, parts
from support.vllm_engine.pages import negate
from support.vllm_engine.parts import half, worker_half

SLOW_SECONDS = 3.0
"""A gathering that is slow: longer than a load may take."""


@dataclass
class Hooks:
    """What is armed in this process, and what has been seen.

    Attributes:
        armed: how often each fault is still to be injected, by (fault, name of the request or empty).
        injected: how often each has been.
        told: events of each request, by its outer name.
        held: reads that are held back, by request.
        leases: name of the lease and block tables of what a request left for a consumer, by its outer name.
        seals: why the last sealed grant of a ticket did not open, or "opened"; by the ticket.
        changed: what was changed of what a request read, by request.
        gate, fleet_gate: set when calls of the file tier, and READs of the fleet tier, go on that hang.
    """

    armed: Counter[tuple[str, str]] = field(default_factory=Counter)
    injected: Counter[tuple[str, str]] = field(default_factory=Counter)
    told: dict[str, list[dict[str, Any]]] = field(default_factory=lambda: defaultdict(list))
    held: dict[str, list[Callable[[], None]]] = field(default_factory=lambda: defaultdict(list))
    leases: dict[str, tuple[str, list[list[int]]]] = field(default_factory=dict)
    of_load: dict[str, str] = field(default_factory=dict)
    of_read: dict[str, str] = field(default_factory=dict)
    seals: dict[str, str] = field(default_factory=dict)
    changed: dict[str, str] = field(default_factory=dict)
    gate: threading.Event = field(default_factory=threading.Event)
    fleet_gate: threading.Event = field(default_factory=threading.Event)

    def take(self, fault: str, name: str = "") -> bool:
        """Return whether a fault is to be injected now, and count it."""
        if self.armed[fault, name] <= 0:
            return False
        self.armed[fault, name] -= 1
        self.injected[fault, name] += 1
        return True


def outer(request_id: str) -> str:
    """The name that the campaign gave a request."""
    return request_id.split("-", maxsplit=1)[0]


def install(engine: Any) -> None:
    """Put all hooks in place; nothing is armed."""
    hooks = engine.hooks = Hooks()
    half(engine).events.subscribe(partial(_hear, hooks))
    _hook_reads(worker_half(engine), hooks)
    _hook_leases(parts.producer(engine), hooks)
    _hook_control(parts.client(engine), parts.server(engine), hooks)
    _hook_threads(engine, hooks)
    _hook_seals(hooks)
    _hook_gathering(parts.gatherer(engine), hooks)


def arm(engine: Any, fault: str, name: str = "", times: int = 1) -> None:
    """Have a fault injected the next so many times."""
    engine.hooks.armed[fault, name] += times


def disarm(engine: Any, fault: str, name: str = "") -> int:
    """Have it injected no more; return how often it was."""
    engine.hooks.armed[fault, name] = 0
    return int(engine.hooks.injected[fault, name])


def told(engine: Any, name: str) -> list[dict[str, Any]]:
    """What was said of a request, in order."""
    return list(engine.hooks.told[name])


def seal_of(engine: Any, ticket: str) -> str:
    """What became of the last sealed grant that came with a ticket; empty if none was looked at."""
    return str(engine.hooks.seals.get(ticket, ""))


def changed(engine: Any, name: str) -> str:
    """What was changed of a request's read; empty if nothing was."""
    return str(engine.hooks.changed.get(name, ""))


def holds(engine: Any, name: str) -> int:
    """How many reads of a request are held back."""
    return len(engine.hooks.held[name])


def let_go(engine: Any, name: str) -> int:
    """Post the reads that were held back; return how many."""
    orders = engine.hooks.held.pop(name, [])
    for post in orders:
        post()
    return len(orders)


def would_overwrite(engine: Any, name: str) -> int:
    """How many blocks of running requests the reads write that are held back of a request."""
    found = parts.scheduler(engine)
    orders = [post.args[0] for post in engine.hooks.held[name]]
    written = {int(number) for order in orders for table in order.dst_tables for number in table} - {0}
    tables = [found.kv_cache_manager.get_block_ids(one.request_id) for one in found.running]
    return len(written & {number for groups in tables for table in groups for number in table})


def forget_peers(engine: Any) -> int:
    """Have the engine shake hands anew with all peers; return how many it knew."""
    handshakes = parts.client(engine)._handshakes
    addresses = list(handshakes._answers)
    for address in addresses:
        parts.client(engine).forget(address)
    return len(addresses)


def forgive(engine: Any) -> bool:
    """Let refusals and silences of peers be over, which stand for a while.

    Returns:
        False while a handshake is under way, which may end in a refusal.
    """
    client = parts.client(engine)
    answers = dict(client._handshakes._answers)
    for address in (at for at, answer in answers.items() if isinstance(answer, Unusable)):
        client.forget(address)
    for lane in parts.lanes(engine):
        for peer in lane._links:
            for source in peer.sources:
                if source.client is not None:
                    source.client.silent_until = 0.0
    return not any(isinstance(answer, Pending) for answer in answers.values())


def expire(engine: Any, name: str) -> bool:
    """Let the lease of a request run out now; return whether it was held."""
    lease = engine.hooks.leases[name][0]
    book = parts.lease_book(engine)
    held = book._held.get(lease)
    if held is not None:
        held.expires = 0.0
        book._note_due(lease, held)
    return held is not None


def lease_is_over(engine: Any, name: str) -> bool:
    """Whether the lease of a request has ended and its blocks are given back."""
    lease = engine.hooks.leases[name][0]
    book = parts.lease_book(engine)
    known = parts.scheduler(engine).requests
    return lease not in book._held and lease not in book._ending and lease not in known


def overwrite(engine: Any, name: str) -> int:
    """Write other bytes to free blocks that a request had, as their next owner does; return how many."""
    pool = parts.scheduler(engine).kv_cache_manager.block_pool
    worker, count = worker_half(engine), 0
    for group, table in zip(worker.geometry.groups, engine.hooks.leases[name][1], strict=True):
        for number in table:
            block = pool.blocks[number]
            if number == 0 or block.ref_cnt:
                continue
            pool._maybe_evict_cached_block(block)
            count += 1
            for layer in group.layers:
                negate(worker, layer, number)
    return count


def rejected(engine: Any) -> int:
    """Messages that the control channel could not understand so far."""
    return int(parts.server(engine).rejected)


def port(engine: Any) -> int:
    """The port of the control channel."""
    return int(parts.server(engine).port)


def keys(engine: Any) -> tuple[bytes, bytes]:
    """Both halves of the engines' key, the public one first."""
    ours = half(engine)._peering.client._keys
    return bytes(ours.public), bytes(ours.secret)


def _hear(hooks: Hooks, event: Any) -> None:
    name = getattr(event, "request_id", None)
    if name is not None:
        kept = (
            "outcome",
            "miss",
            "source",
            "failure",
            "reason",
            "expired",
            "withdrawn",
            "cached_tokens",
            "why",
        )
        # What an event ended names the source of a load.
        events = (event, getattr(event, "began", event))
        found = {key: getattr(one, key) for one in events for key in kept if hasattr(one, key)}
        hooks.told[outer(name)].append({"event": type(event).__name__, **found})


def _hook_reads(worker: Any, hooks: Hooks) -> None:
    """Let reads be held back, and the transport refuse them, by request."""
    transfers, begin = worker._transfers, worker.begin
    submit = transfers.submit

    def begun(meta: Any) -> None:
        for load in meta.loads:
            hooks.of_load[load.key] = outer(load.request_id)
        for part in meta.parts:
            if part.work is not None:
                hooks.of_read[part.work.key] = hooks.of_load[part.load]
        begin(meta)

    def submitted(*orders: Any, idle: bool = False) -> None:
        posted = []
        for order in orders:
            name = hooks.of_read.get(order.key, "")
            if hooks.take("hold", name):
                hooks.held[name].append(partial(submit, order))
            else:
                posted.append(order)
        submit(*posted, idle=idle)

    worker.begin, transfers.submit = begun, submitted
    for lane in transfers._lanes:
        lane._post = partial(_post, lane, lane._post, hooks)
    on_the_way.when_landed(transfers._lanes, partial(_change, worker, hooks))


def _change(worker: Any, hooks: Hooks, order: Any) -> None:
    """Change what an order has read, if that is armed for its request."""
    name = hooks.of_read.get(order.key, "")
    if hooks.take("flip a bit", name):
        hooks.changed[name] = on_the_way.flip_bit(worker, order, random.Random(name))
    if hooks.take("flip signs", name):
        found = [on_the_way.flip_signs(worker, order, n, 8) for n in range(len(worker.geometry.groups))]
        hooks.changed[name] = "; ".join(filter(None, found))


class _Refusing:
    """A transport agent that refuses every read."""

    def read(self, *_: Any) -> Any:
        raise RuntimeError("injected: the transport is gone")


def _post(lane: Any, inner: Any, hooks: Hooks, read: Any, **lists: Any) -> None:
    resources = lane._lane
    if hooks.take("refuse", hooks.of_read.get(read.order.key, "")):
        lane._lane = replace(resources, agent=_Refusing())
    inner(read, **lists)
    lane._lane = resources


def _hook_threads(engine: Any, hooks: Hooks) -> None:
    """Let something unexpected be raised in each of the threads."""
    owners = [(lane, "_read_words", "break lane") for lane in parts.lanes(engine)]
    owners += [
        (parts.client(engine)._redemptions, "handle_reply", "break client"),
        (parts.server(engine).tickets, "redeem", "break server"),
        (parts.gatherer(engine), "_gather", "break gather"),
    ]
    for owner, method, fault in owners:
        setattr(owner, method, partial(_breaking, getattr(owner, method), hooks, fault))


def _breaking(inner: Any, hooks: Hooks, fault: str, *args: Any) -> Any:
    if hooks.take(fault):
        raise RuntimeError(f"injected: {fault}")
    return inner(*args)


def _hook_seals(hooks: Hooks) -> None:
    """Remember what became of sealed grants."""
    inner = control_client.open_seal

    def opened(key: bytes, sealed: str, binding: SealBinding) -> Any:
        ticket = binding.ticket.hex()
        try:
            found = inner(key, sealed, binding)
        except ProtocolError as error:
            hooks.seals[ticket] = str(error)
            raise
        hooks.seals[ticket] = "opened"
        return found

    control_client.open_seal = opened


def _hook_gathering(server: Any, hooks: Hooks) -> None:
    """Let requests to gather and their answers be lost, copies be slow, and images be given to others."""
    ask, copy, answer = server._ask, server._copy, server._answer

    def asked(sender: bytes, message: Any) -> None:
        if not hooks.take("lose gather"):
            ask(sender, message)

    def copied(*args: Any) -> Any:
        if hooks.take("slow gather"):
            time.sleep(SLOW_SECONDS)
        return copy(*args)

    def answered(sender: bytes, reply: Any) -> None:
        if hooks.take("lose gathered"):
            return
        if isinstance(reply, Gathered) and hooks.take("reuse images"):
            held = server._readers[sender].allocations.pop(reply.segment)
            server._free(held)
            area = server.area
            first = area.region.address - area._memory.data_ptr() + held.allocation.unit * UNIT_BYTES
            area._memory[first : first + held.allocation.units * UNIT_BYTES].bitwise_xor_(0x80)
        answer(sender, reply)

    server._ask, server._copy, server._answer = asked, copied, answered


def _hook_leases(producer: Any, hooks: Hooks) -> None:
    """Remember what a request left for a consumer."""
    finished, tables = producer.finished, producer._engine.tables

    def watched(request: Any, block_ids: Any) -> Any:
        kept = finished(request, block_ids)
        if kept[0]:
            found = tables(block_ids, request.num_prompt_tokens)
            hooks.leases[outer(request.request_id)] = (request.request_id, [list(ids) for ids in found])
        return kept

    producer.finished = watched


def _hook_control(client: Any, server: Any, hooks: Hooks) -> None:
    """Let messages of either end be lost, doubled or garbled."""
    client._send = _sending(client, hooks)
    server._listener.send = _answering(server._listener.send, hooks)


def _sending(client: Any, hooks: Hooks) -> Any:
    send = client._send

    def sent(address: Any, message: Any) -> None:
        kind = type(message).__name__
        if isinstance(message, Claim):
            kind = "Release" if message.released else "Heartbeat"
        if hooks.take(f"lose {kind}"):
            return
        if hooks.take(f"garble {kind}"):
            raw = client._peers[address].socket.raw
            raw.send(random.Random(hooks.injected.total()).randbytes(200), zmq.DONTWAIT)
        if hooks.take(f"double {kind}"):
            send(address, message)
        send(address, message)

    return sent


def _answering(answer: Any, hooks: Hooks) -> Any:
    def answered(to: bytes, message: bytes) -> None:
        if hooks.take("lose answers"):
            return
        if hooks.take("cut answers"):
            message = message[: len(message) // 2]
        if hooks.take("garble answers"):
            middle = len(message) // 2
            message = message[:middle] + bytes(64) + message[middle + 64 :]
        if hooks.take("double answers"):
            answer(to, message)
        answer(to, message)

    return answered
