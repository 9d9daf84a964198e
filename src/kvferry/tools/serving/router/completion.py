"""A completion request of a client, as the router serves it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from starlette.types import Send

from kvferry.tools.serving.router.backends import Backend
from kvferry.tools.serving.router.bodies import KV_PARAMS
from kvferry.tools.serving.router.endpoint import Call
from kvferry.tools.serving.router.events import RelayedStream, end_broken
from kvferry.tools.serving.router.failures import Failures
from kvferry.tools.serving.router.metrics import AloneReason
from kvferry.tools.serving.router.prefixes import PrefixHolders
from kvferry.tools.serving.router.replies import Reply


@dataclass(slots=True)
class Completion:
    """A completion request of a client, and what has happened to it."""

    call: Call
    body: dict[str, Any]
    send: Send
    session: int | None = None  # session of the request, as `session_of` returns it; None if it has none
    # Decode engine that keeps the response which the request continues; None if any may answer.
    keeper: Backend | None = None
    # The stream that the client gets, if its answer is one.
    stream: RelayedStream = field(default_factory=RelayedStream)
    # Body of the request for the rest of the stream; None before an engine has failed in it.
    rest: dict[str, Any] | None = None
    # Failures of engines during this request, and deaths during equal ones.
    failures: Failures = field(default_factory=Failures)
    # Prefill engines that may hold KV for this request, by the name of that KV.
    held: dict[str, Backend] = field(default_factory=dict)
    # Prefill engines that have refused this request, each with a description of its answer.
    refusals: list[tuple[Backend, str]] = field(default_factory=list)

    # Engines that have a prefix of the prompt in host memory.
    holders: PrefixHolders = field(default_factory=PrefixHolders)

    @property
    def without_kv(self) -> AloneReason:
        """Reason why prefill engines were asked, but the decode engine computes the prompt."""
        return AloneReason.REFUSED if self.refusals else AloneReason.NO_KV

    @property
    def asked(self) -> dict[str, Any]:
        """Body of the request to engines, without what the router adds."""
        return self.body if self.rest is None else self.rest

    def hinted(self, backend: Backend) -> dict[str, Any]:
        """Return `asked`, with the names of other engines from which an engine should read a prefix."""
        named = self.holders.hint(backend)
        if not named:
            return self.asked
        self.call.record.hinted = True
        return {**self.asked, KV_PARAMS: {**(self.asked.get(KV_PARAMS) or {}), "remote_caches": named}}

    async def reply(self, reply: Reply) -> None:
        """Send the answer to the client. A stream that has begun cannot have another answer, and ends."""
        if self.stream.begun:
            await self.end_broken()
        else:
            await reply.send(self.send, self.call.reply_headers)

    async def end_broken(self) -> None:
        self.call.record.broken = True
        await end_broken(self.send, self.call.path, self.failures.latest)

    def failure(self) -> Reply:
        return self.failures.reply(self.call.path, self.call.reply_headers)


class Offer(NamedTuple):
    """The KV of a prompt in a prefill engine, for a decode engine."""

    backend: Backend
    params: dict[str, Any]  # ``kv_transfer_params``
