"""The campaign's end of an engine that serves all the time: commands and answers, awaited."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

from faults.engine import serve
from support.vllm_engine.process import Engine, EngineError

REQUEST_SECONDS = 40.0
"""A request that has not ended by then is stuck: far beyond every deadline of these engines together."""


class Stuck(Exception):
    """A request that did not end."""


class Served(Engine):
    """One engine process that serves all the time.

    Attributes:
        died: why it ended; empty while it runs, or if the campaign has ended it.
        adapter_of: the folder of a prompt's LoRA adapter; empty: it has none.
    """

    main = staticmethod(serve)
    adapter_of: Callable[[list[int]], str]

    def listen(self) -> None:
        """Hear it from now on, in the running event loop; it is ready."""
        self.died = ""
        self._numbers = itertools.count()
        self._values: dict[int, asyncio.Future[Any]] = {}
        self._answers: dict[str, list[asyncio.Future[Any]]] = {}
        self._expected_to_live = True
        asyncio.get_running_loop().add_reader(self._pipe.fileno(), self._hear)

    def deafen(self) -> None:
        """Hear it no more: it is about to be stopped or killed."""
        self._expected_to_live = False
        asyncio.get_running_loop().remove_reader(self._pipe.fileno())
        self._fail("the engine was ended by the campaign")

    async def do(self, name: str, *arguments: Any, seconds: float = REQUEST_SECONDS) -> Any:
        """Run a command inside the engine, between two steps."""
        if self.died:
            raise EngineError(self.died)
        number = next(self._numbers)
        found = self._values[number] = asyncio.get_running_loop().create_future()
        self._pipe.send((number, name, arguments))
        return await asyncio.wait_for(found, seconds)

    async def ask(
        self,
        name: str,
        text: list[int],
        params: dict[str, Any] | None,
        tokens: int,
        salt: str,
        adapter: str | None = None,
    ) -> asyncio.Future[Any]:
        """Add a request, with the prompt's own adapter if none is named; return what becomes its answer.

        Of requests with one name, the first that ends answers the first that was asked.
        """
        found = asyncio.get_running_loop().create_future()
        self._answers.setdefault(name, []).append(found)
        found.add_done_callback(_nobody_may_care)
        try:
            of = self.adapter_of(text) if adapter is None else adapter
            await self.do("ask", name, text, params, tokens, salt, of)
        except EngineError:
            if found in self._answers.get(name, ()):
                self._answers[name].remove(found)
            raise
        return found

    async def answer(
        self, name: str, found: asyncio.Future[Any], seconds: float = REQUEST_SECONDS
    ) -> dict[str, Any]:
        """The answer to a request.

        Raises:
            Stuck: it does not come.
        """
        try:
            answer: dict[str, Any] = await asyncio.wait_for(found, seconds)
        except TimeoutError:
            raise Stuck(f"request {name} has not ended after {seconds:g} s") from None
        return answer

    async def leave(self, name: str) -> None:
        """Abort a request, as a client that goes away does."""
        self._answers.pop(name, None)
        await self.do("abort", [name])

    async def until(self, command: str, *arguments: Any, is_: Any = True, seconds: float = 20.0) -> Any:
        """Run a command until its result is this, or true; return whether that came to be."""
        for _ in range(int(seconds / 0.05)):
            found = await self.do(command, *arguments)
            if found == is_ or (is_ is True and found):
                return found
            await asyncio.sleep(0.05)
        return False

    def _hear(self) -> None:
        try:
            while self._pipe.poll():
                self._take(*self._pipe.recv())
        except (EOFError, OSError):
            self._end("its process ended")

    def _take(self, kind: str, which: Any, value: Any) -> None:
        if kind == "died":
            self._end(str(value))
            return
        waiting = self._asked(which) if kind == "done" else self._values.pop(which, None)
        if waiting is None or waiting.done():
            return
        if kind == "error":
            waiting.set_exception(EngineError(f"{value}\nsee {self.log}"))
        else:
            waiting.set_result(value)

    def _asked(self, name: str) -> asyncio.Future[Any] | None:
        """Take out the oldest request of a name that has no answer."""
        asked = self._answers.get(name)
        if not asked:
            return None
        found = asked.pop(0)
        if not asked:
            del self._answers[name]
        return found

    def _end(self, why: str) -> None:
        asyncio.get_running_loop().remove_reader(self._pipe.fileno())
        if self._expected_to_live:
            self.died = f"{why}; see {self.log}"
        self._fail(why)

    def _fail(self, why: str) -> None:
        for waiting in (*self._values.values(), *itertools.chain(*self._answers.values())):
            if not waiting.done():
                waiting.set_exception(EngineError(why))
        self._values.clear()
        self._answers.clear()


def _nobody_may_care(found: asyncio.Future[Any]) -> None:
    """Let an answer that no trial waits for fail in silence."""
    if not found.cancelled():
        found.exception()


def engine(log: Path, environment: dict[str, str], settings: dict[str, Any]) -> Served:
    """Start an engine; `ready`, then `listen`."""
    return Served(log, environment, **settings)
