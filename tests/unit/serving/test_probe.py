"""Whether an engine is well, by what is at its address."""

from __future__ import annotations

import anyio
import httpx
import pytest

from kvferry.serving.router.backends import Backend
from kvferry.serving.router.probe import probe, watch_down


class Endless(httpx.AsyncByteStream):
    """A body that does not end; counts what is taken of it."""

    def __init__(self) -> None:
        self.taken = 0

    async def __aiter__(self):
        while self.taken < 100:
            self.taken += 1
            yield bytes(1 << 20)


@pytest.mark.parametrize(("status", "up"), [(200, True), (503, False)])
def test_of_an_answer_that_does_not_end_only_the_status_is_read(status, up):
    body, backend = Endless(), Backend("decode", "http://127.0.0.1:8000/")

    async def ask():
        transport = httpx.MockTransport(lambda _: httpx.Response(status, stream=body))
        async with httpx.AsyncClient(transport=transport) as client:
            await probe(client, backend)

    anyio.run(ask)
    assert (backend.up, body.taken) == (up, 0)


def test_only_engines_that_are_down_are_asked_in_the_background():
    up, down = (Backend("decode", f"http://{name}") for name in ("up", "down"))
    down.mark_down("gone")
    asked = []

    async def watch():
        def answer(request):
            asked.append(request.url.host)
            if len(asked) == 4:
                scope.cancel()
            return httpx.Response(503)

        async with httpx.AsyncClient(transport=httpx.MockTransport(answer)) as client:
            with anyio.CancelScope() as scope:
                await watch_down(client, [up, down], 0.0)

    anyio.run(watch)
    assert asked == ["down"] * 4
