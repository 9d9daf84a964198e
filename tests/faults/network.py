"""Faults of the network and of peers: messages lost, doubled and garbled; strangers; garbage on ports."""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
from typing import Any

import zmq

from faults.kinds import kind
from faults.stage import HANDSHAKE, LEASE, NO_ANSWER, UNANSWERED, Stage
from faults.values import Area, Trial
from kvferry.transport.messages import PROTOCOL, Claim, Facts, Hello, encode

NETWORK = Area.NETWORK
STRANGER = "127.0.0.2"
"""An address that is none of the peers, on this machine."""
GREETING_BYTES = 64
"""What ZeroMQ says to everybody (ZMTP 3.1, section 3)."""
CLOSED_SECONDS = 20.0
"""How long a stranger waits for its connection to be closed: ten times as long as it may take."""


async def _armed(stage: Stage, trial: Trial, draw: random.Random, engine: Any, fault: str) -> str:
    """One request through both engines, with a fault of the control channel armed; its name."""
    text, salt = stage.text(draw, 129), stage.salt(draw)
    await engine.do("disarm", fault)
    before = await engine.do("disarm", fault)
    await stage.decode.do("forget_peers")
    await engine.do("arm", fault)
    name = await stage.through(trial, text, salt)
    count = await engine.do("disarm", fault) - before
    trial.injected = f"{count} time(s): {fault}" if count else ""
    return name


@kind("answers lost", NETWORK, "The producer's answer to a handshake is lost.", share=0.3, together=1)
async def answers_lost(stage: Stage, trial: Trial, draw: random.Random) -> None:
    name = await _armed(stage, trial, draw, stage.prefill, "lose answers")
    trial.detected = await stage.failed(name, UNANSWERED)


@kind(
    "answers cut short",
    NETWORK,
    "The producer's answer to a handshake is cut off in the middle.",
    share=0.3,
    together=1,
)
async def answers_cut(stage: Stage, trial: Trial, draw: random.Random) -> None:
    name = await _armed(stage, trial, draw, stage.prefill, "cut answers")
    trial.detected = await stage.failed(name, NO_ANSWER)


@kind(
    "answers garbled",
    NETWORK,
    "64 bytes in the middle of the producer's answer are zeros.",
    share=0.3,
    together=1,
)
async def answers_garbled(stage: Stage, trial: Trial, draw: random.Random) -> None:
    name = await _armed(stage, trial, draw, stage.prefill, "garble answers")
    trial.detected = await stage.failed(name, NO_ANSWER) or "the answer was usable, or asked for again"


@kind("answers doubled", NETWORK, "The producer's answers arrive twice.", share=0.3, together=1)
async def answers_doubled(stage: Stage, trial: Trial, draw: random.Random) -> None:
    name = await _armed(stage, trial, draw, stage.prefill, "double answers")
    loads = await stage.from_peer(name, "LoadEnded")
    trial.detected = "the second was ignored" if len(loads) == 1 else ""


@kind("hello lost", NETWORK, "The consumer's first word to a producer is lost.", share=0.3, together=1)
async def hello_lost(stage: Stage, trial: Trial, draw: random.Random) -> None:
    name = await _armed(stage, trial, draw, stage.decode, "lose Hello")
    trial.detected = await stage.failed(name, UNANSWERED)


@kind(
    "garbage before hello",
    NETWORK,
    "Random bytes reach the producer before the consumer's first word.",
    together=1,
    share=0.3,
)
async def garbage_first(stage: Stage, trial: Trial, draw: random.Random) -> None:
    before = await stage.prefill.do("rejected")
    await _armed(stage, trial, draw, stage.decode, "garble Hello")
    count = await stage.prefill.do("rejected") - before
    trial.detected = f"{count} message(s) rejected" if count else ""


@kind(
    "ticket lost on its way", NETWORK, "The consumer's redemption of a ticket is lost.", share=2, together=1
)
async def redeem_lost(stage: Stage, trial: Trial, draw: random.Random) -> None:
    text, salt, mine = stage.text(draw, 129), stage.salt(draw), stage.name()
    params = await stage.prefilled(text, salt)
    params.pop("remote_sealed_grant", None)
    before = await stage.decode.do("disarm", "lose Redeem")
    await stage.decode.do("arm", "lose Redeem", "", 1 << 20)
    await stage.decoded(trial, text, params, salt, mine)
    count = await stage.decode.do("disarm", "lose Redeem") - before
    trial.injected = f"{count} redemption(s) lost" if count else ""
    trial.detected = await stage.failed(mine, UNANSWERED)


@kind("release lost", NETWORK, "The consumer's word that it is done is lost.", share=0.3, together=1)
async def release_lost(stage: Stage, trial: Trial, draw: random.Random) -> None:
    text, salt, theirs = stage.text(draw), stage.salt(draw), stage.name()
    params = await stage.prefilled(text, salt, theirs)
    before = await stage.decode.do("disarm", "lose Release")
    await stage.decode.do("arm", "lose Release")
    await stage.decoded(trial, text, params, salt)
    if await stage.prefill.until("lease_is_over", theirs, seconds=LEASE + 20):
        ends = await stage.told(theirs, "LeaseEnded", stage.prefill)
        trial.detected = "the lease ran out" if ends and ends[-1]["expired"] else ""
    count = await stage.decode.do("disarm", "lose Release") - before
    trial.injected = "a release was lost" if count else ""


@kind("release doubled", NETWORK, "The consumer's word that it is done arrives twice.", share=0.3, together=1)
async def release_doubled(stage: Stage, trial: Trial, draw: random.Random) -> None:
    text, salt, theirs = stage.text(draw), stage.salt(draw), stage.name()
    params = await stage.prefilled(text, salt, theirs)
    before = await stage.decode.do("disarm", "double Release")
    await stage.decode.do("arm", "double Release")
    await stage.decoded(trial, text, params, salt)
    if await stage.prefill.until("lease_is_over", theirs):
        ends = await stage.told(theirs, "LeaseEnded", stage.prefill)
        trial.detected = "the lease ended once" if len(ends) == 1 else ""
    count = await stage.decode.do("disarm", "double Release") - before
    trial.injected = "a release was doubled" if count else ""


@kind(
    "heartbeats lost",
    NETWORK,
    "A consumer that holds a read back is not heard of any more.",
    share=0.3,
    together=1,
)
async def heartbeats_lost(stage: Stage, trial: Trial, draw: random.Random) -> None:
    text, salt, mine, theirs = stage.text(draw, 200), stage.salt(draw), stage.name(), stage.name()
    params = await stage.prefilled(text, salt, theirs)
    before = await stage.decode.do("disarm", "lose Heartbeat")
    await stage.decode.do("arm", "lose Heartbeat", "", 1000)
    await stage.decode.do("arm", "lose Release")
    await stage.decode.do("arm", "hold", mine)
    await stage.decoded(trial, text, params, salt, mine)
    await stage.decode.do("let_go", mine)
    if await stage.prefill.until("lease_is_over", theirs, seconds=LEASE + 20):
        ends = await stage.told(theirs, "LeaseEnded", stage.prefill)
        trial.detected = "the lease ran out" if ends and ends[-1]["expired"] else ""
    count = await stage.decode.do("disarm", "lose Heartbeat") - before
    await stage.decode.do("disarm", "lose Release")
    trial.injected = f"{count} heartbeats lost" if count else ""


@kind("garbage on the control port", NETWORK, "A stranger sends random bytes to the control port.")
async def garbage(stage: Stage, trial: Trial, draw: random.Random) -> None:
    port = await stage.prefill.do("port")
    size = draw.choice([1, 10, 64, 1000, 100_000])

    said = draw.randbytes(size)

    def send() -> tuple[int, bool]:
        """How many bytes came back, and whether the engine closed the connection."""
        heard = 0
        with socket.create_connection(("127.0.0.1", port), 5) as stranger:
            stranger.settimeout(CLOSED_SECONDS)
            try:
                stranger.sendall(said)
                while data := stranger.recv(4096):
                    heard += len(data)
            except TimeoutError:
                return heard, False
            except ConnectionError:
                pass  # closed, with bytes of ours unread
        return heard, True

    heard, closed = await asyncio.to_thread(send)
    trial.injected = f"{size} random bytes"
    if closed and heard <= GREETING_BYTES:
        trial.detected = f"the engine closed the connection after {heard} bytes of greeting"
    await stage.through(trial, stage.text(draw), stage.salt(draw))


@kind(
    "stranger without the key", NETWORK,
    "A stranger speaks the protocol under a key of its own, and knows the engine's public key.",
    protections=("key",),
)  # fmt: skip
async def stranger(stage: Stage, trial: Trial, draw: random.Random) -> None:
    port, (public, _) = await stage.prefill.do("port"), await stage.prefill.do("keys")
    count, answered = await asyncio.to_thread(_speak, draw, f"tcp://127.0.0.1:{port}", public, None)
    trial.injected = f"{count} messages under a key of its own"
    if answered:
        trial.forbidden.append("a stranger without the key was answered")
    else:
        trial.detected = "no answer"
    await stage.through(trial, stage.text(draw), stage.salt(draw))


def _speak(
    draw: random.Random, endpoint: str, server: bytes, own: tuple[bytes, bytes] | None
) -> tuple[int, bool]:
    """Speak the protocol to a control port; how many messages were sent, and whether one was answered.

    Args:
        draw: of who is speaking.
        endpoint: where to, as ZeroMQ spells it.
        server: the port's public key.
        own: the speaker's key, public half first; a new one if None.
    """
    facts = Facts("stranger", draw.randrange(1, 1 << 32), "kvferry", {})
    messages = [Hello(PROTOCOL, facts), Claim(7, [bytes(16)]), Claim(7, [bytes(16)], released=True)]
    context: Any = zmq.Context()
    try:
        peer = context.socket(zmq.DEALER)
        peer.linger = 0
        peer.curve_publickey, peer.curve_secretkey = own or zmq.curve_keypair()
        peer.curve_serverkey = server
        peer.connect(endpoint)
        for message in messages:
            with contextlib.suppress(zmq.Again):  # the engine may have turned it away already
                peer.send(encode(message), zmq.NOBLOCK)
        return len(messages), bool(peer.poll(500))
    finally:
        context.destroy(linger=0)


@kind(
    "stranger with the key", NETWORK,
    "A machine that is none of the peers speaks the protocol under the engines' own key.",
    protections=("peers",),
)  # fmt: skip
async def not_a_peer(stage: Stage, trial: Trial, draw: random.Random) -> None:
    port, own = await stage.prefill.do("port"), await stage.prefill.do("keys")
    endpoint = f"tcp://{STRANGER}:0;127.0.0.1:{port}"
    count, answered = await asyncio.to_thread(_speak, draw, endpoint, own[0], own)
    trial.injected = f"{count} messages from {STRANGER}"
    if answered:
        trial.forbidden.append(f"{STRANGER}, which is none of the peers, was answered")
    else:
        trial.detected = "no answer"
    await stage.through(trial, stage.text(draw), stage.salt(draw))


@kind(
    "offer of a stranger's address", NETWORK,
    "A client's offer names an address that is none of the peers, and something listens there.",
    protections=("peers",),
)  # fmt: skip
async def dialled(stage: Stage, trial: Trial, draw: random.Random) -> None:
    text, salt, met = stage.text(draw), stage.salt(draw), []
    params = await stage.prefilled(text, salt)

    async def meet(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        met.append(1)
        writer.close()

    server = await asyncio.start_server(meet, STRANGER, 0)
    port = server.sockets[0].getsockname()[1]
    trial.injected = f"an offer that names {STRANGER} port {port}"
    name = await stage.decoded(trial, text, {**params, "remote_host": STRANGER, "remote_port": port}, salt)
    server.close()
    trial.detected = await stage.failed(name, "none of the peers")
    if met:
        trial.forbidden.append(f"the engine dialled {STRANGER}, which is none of the peers")


@kind(
    "peer that only answers garbage",
    NETWORK,
    "An offer names a port at which something answers that is no engine.",
    share=2,
)
async def impostor(stage: Stage, trial: Trial, draw: random.Random) -> None:
    text, salt = stage.text(draw), stage.salt(draw)
    params = await stage.prefilled(text, salt)
    noise, met = draw.randbytes(300), []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        met.append(1)
        writer.write(noise)
        await asyncio.sleep(HANDSHAKE)
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    name = await stage.decoded(trial, text, {**params, "remote_port": port}, salt)
    trial.injected = f"{len(met)} connection(s) answered with 300 random bytes" if met else ""
    server.close()
    trial.detected = await stage.failed(name, f"{UNANSWERED}|{NO_ANSWER}")


@kind(
    "connection cut",
    NETWORK,
    "A relay between the engines cuts every connection in the middle of a handshake.",
)
async def cut(stage: Stage, trial: Trial, draw: random.Random) -> None:
    limit, cuts = draw.randrange(1, 1500), []

    async def count(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, left: list[int]) -> None:
        while data := await reader.read(min(4096, left[0])):
            left[0] -= len(data)
            writer.write(data)
            await writer.drain()
            if left[0] <= 0:
                cuts.append(limit)
                break
        writer.close()

    await _relayed(stage, trial, draw, count, limit)
    trial.injected = f"{len(cuts)} connection(s) cut after {limit} bytes" if cuts else ""


@kind(
    "link goes silent",
    NETWORK,
    "A relay between the engines forwards nothing more after some bytes.",
    share=3,
)
async def silent(stage: Stage, trial: Trial, draw: random.Random) -> None:
    limit, swallowed = draw.randrange(1, 1500), [0]

    async def swallow(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, left: list[int]) -> None:
        while data := await reader.read(4096):
            passed = data[: max(0, left[0])]
            left[0] -= len(data)
            swallowed[0] += len(data) - len(passed)
            writer.write(passed)
            await writer.drain()

    await _relayed(stage, trial, draw, swallow, limit)
    trial.injected = f"{swallowed[0]} bytes swallowed after {limit}" if swallowed[0] else ""


async def _relayed(stage: Stage, trial: Trial, draw: random.Random, pump: Any, limit: int) -> None:
    """One request whose offer names a relay to the producer's control port.

    Args:
        stage, trial, draw: of the trial.
        pump: forwards one direction; gets how many bytes of the connection may pass, in a list.
        limit: of every connection.
    """
    text, salt, port = stage.text(draw), stage.salt(draw), await stage.prefill.do("port")
    params = await stage.prefilled(text, salt)
    pumps: list[asyncio.Task[None]] = []

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection("127.0.0.1", port)
        left = [limit]
        pumps.extend(asyncio.create_task(pump(*ends, left)) for ends in ((reader, back), (there, writer)))
        await asyncio.wait(pumps[-2:], return_when=asyncio.FIRST_COMPLETED)
        back.close()
        writer.close()

    server = await asyncio.start_server(relay, "127.0.0.1", 0)
    relayed = server.sockets[0].getsockname()[1]
    name = await stage.decoded(trial, text, {**params, "remote_port": relayed}, salt)
    trial.detected = await stage.failed(name, UNANSWERED)
    server.close()
    for task in pumps:
        task.cancel()
    await asyncio.gather(*pumps, return_exceptions=True)
