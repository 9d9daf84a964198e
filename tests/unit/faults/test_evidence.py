"""Kinds of faults find nothing where nothing happens."""

from __future__ import annotations

import asyncio
import itertools
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import zmq

from faults import network
from faults.campaign import KINDS
from faults.storage import dropped_since
from faults.values import Fault, Trial, judged
from fuzz.rigs import new_keys
from kvferry.tiers.names import PutOutcome
from kvferry.transport.control_server import ControlServer
from kvferry.transport.messages import PeerInfo
from transport.cards import cards, facts

pytestmark = pytest.mark.slow

HOST = "127.0.0.1"
GARBAGE = "garbage on the control port"


class QuietEngine:
    """An engine of which nothing is known but what a trial needs to go on."""

    def __init__(self, port: int) -> None:
        self.pid = 0
        self._known: dict[str, Any] = {"port": port, "keys": zmq.curve_keypair(), "counters": {"pins": 0}}

    async def do(self, name: str, *arguments: Any, **_: Any) -> Any:
        empty: dict[str, Any] = {"missed": {}, "dropped": {}, "told": [], "known": ""}
        empty |= {"directory_entries": (b"", []), "directory_run": b""}
        return self._known.get(name, empty.get(name, 0))

    async def until(self, *_: Any, **__: Any) -> bool:
        return False

    async def ask(self, *_: Any) -> dict[str, Any]:
        return {}

    async def answer(self, *_: Any) -> dict[str, Any]:
        return {}

    async def leave(self, *_: Any) -> None:
        pass

    def signal(self, _: int) -> None:
        pass


class QuietStage:
    """A pair that answers everything rightly, and whose engines say and show nothing."""

    def __init__(self, folder: Path, port: int) -> None:
        self.folder = self.directory = folder
        self.prefill, self.decode = QuietEngine(port), QuietEngine(port)
        self.other_namespace, self.storage, self.holder = "", asyncio.Lock(), (HOST, port)
        texts = [list(range(n)) for n in (400, 401)]
        self.references = SimpleNamespace(
            texts=texts,
            long=texts,
            adapter_of=lambda _: "",
            other_adapter=lambda _: "",
            why_wrong=lambda *_: "",
        )
        self._names = itertools.count()

    def name(self) -> str:
        return f"r{next(self._names)}"

    def salt(self, _: Any) -> str:
        return "salt"

    def text(self, *_: Any) -> list[int]:
        return self.references.texts[0]

    def of_other_weights(self) -> tuple[list[int], str]:
        return self.references.texts[0], "salt"

    async def tokens_at_hand(self, *_: Any) -> int:
        return 9

    async def prefilled(self, *_: Any, **__: Any) -> dict[str, Any]:
        offer = {"remote_request_id": "0" * 32, "remote_num_tokens": 9, "remote_host": HOST, "remote_port": 1}
        return {**offer, "remote_sealed_grant": "A" * 80}

    async def decoded(self, trial: Trial, *_: Any, **__: Any) -> str:
        trial.answers += 1
        return self.name()

    async def asked(self, _: Any, trial: Trial, *__: Any, **___: Any) -> str:
        return await self.decoded(trial)

    async def through(self, trial: Trial, *_: Any) -> str:
        return await self.decoded(trial)

    async def failed(self, *_: Any) -> str:
        return ""

    async def told(self, *_: Any) -> list[dict[str, Any]]:
        return []

    from_peer = files_of = told

    async def restart(self, _: str) -> None:
        pass

    kill = start_anew = restart

    @asynccontextmanager
    async def fleet_directory(self) -> AsyncIterator[Any]:
        yield SimpleNamespace(client=MagicMock, terminate=lambda: None)

    async def in_fleet(self, *_: Any, **__: Any) -> int:
        return 0

    async def rest(self) -> dict[str, Any]:
        return {}


@contextmanager
def says(answer: bytes, *, closes: bool) -> Iterator[int]:
    """The port of somebody who says this to everybody, and closes the connection or does not."""
    with socket.create_server((HOST, 0)) as listening:
        taken: list[socket.socket] = []

        def serve() -> None:
            while True:
                try:
                    one, _ = listening.accept()
                except OSError:
                    return
                one.sendall(answer)
                if closes:
                    one.close()
                taken.append(one)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield int(listening.getsockname()[1])
        finally:
            listening.shutdown(socket.SHUT_RDWR)
            thread.join()
            for one in taken:
                one.close()


def tried(name: str, folder: Path, port: int) -> tuple[Trial, Any]:
    async def trial() -> Trial:
        found: Trial = await KINDS[name].trial(QuietStage(folder, port), fault)
        return found

    fault = Fault(0, name, "gemma3", 1)
    found = asyncio.run(trial())
    return found, judged(fault, found)


@pytest.fixture
def no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trials wait for nothing."""
    sleep = asyncio.sleep
    monkeypatch.setattr(asyncio, "sleep", lambda _: sleep(0))


# A kind with a protection is seen to find something, and nothing, by the campaign itself.
@pytest.mark.parametrize("name", [name for name, kind in KINDS.items() if not kind.protections])
def test_kind_detects_nothing_without_a_fault(
    name: str, tmp_path: Path, no_time: None, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(network, "CLOSED_SECONDS", 0.1)
    with says(b"", closes=False) as port:
        trial, verdict = tried(name, tmp_path, port)
    assert trial.answers or not verdict.recovered
    assert not (verdict.injected and verdict.detected), trial


@pytest.mark.parametrize(
    ("answer", "closes", "noticed"),
    [(b"\xff", True, True), (b"\xff", False, False), (bytes(65), True, False)],
)
def test_garbage_counts_as_noticed_only_if_the_connection_closes_after_the_greeting(
    answer: bytes, closes: bool, noticed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    if not closes:
        monkeypatch.setattr(network, "CLOSED_SECONDS", 0.1)
    with says(answer, closes=closes) as port:
        assert tried(GARBAGE, tmp_path, port)[1].detected == noticed


def test_control_channel_closes_connections_that_send_garbage(tmp_path: Path):
    server = ControlServer(HOST, 0, PeerInfo(facts(), cards()), new_keys())
    try:
        assert tried(GARBAGE, tmp_path, server.port)[1].detected
    finally:
        server.close()


def test_stores_count_as_dropped_if_they_are_not_there_now():
    before = {PutOutcome.STORED: 3, PutOutcome.IO_ERROR: 1}
    kept = {PutOutcome.STORED: 5, PutOutcome.PRESENT: 2, PutOutcome.IO_ERROR: 1}
    assert dropped_since(before, kept) == {}
    assert dropped_since(before, {**kept, PutOutcome.IO_ERROR: 3, PutOutcome.FULL: 1}) == {
        PutOutcome.IO_ERROR: 2,
        PutOutcome.FULL: 1,
    }
