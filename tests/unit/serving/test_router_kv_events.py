"""The router follows the events of vLLM's own publisher: from before it came, and over gaps and restarts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import zmq
import zmq.asyncio
from vllm.distributed.kv_events import KVEventBatch, ZmqEventPublisher

from kvferry.tools.serving.router.block_index import BlockIndex
from kvferry.tools.serving.router.kv_events import EventFollower, Publisher
from support.kv_events import stored

SIZE = 4
SECONDS = 10.0


class Engine:
    """vLLM's publisher, and an index that follows it."""

    def __init__(self, folder: Path, *, replays: bool, keeps: int = 1000) -> None:
        self._events, self._replay = f"ipc://{folder}/events", f"ipc://{folder}/replay" if replays else None
        self._keeps = keeps
        self.published = 0
        self.index = BlockIndex()
        self.blocks = self.index.add_engine()
        self.start()

    def start(self) -> None:
        self._publisher = ZmqEventPublisher(
            0, endpoint=self._events, replay_endpoint=self._replay, buffer_steps=self._keeps
        )

    def stop(self) -> None:
        self._publisher.shutdown()

    def publish(self, count: int = 1) -> None:
        """Publish so many batches with the blocks of one prompt, each after those before."""
        for _ in range(count):
            before = range(SIZE * self.published)
            self.published += 1
            event = stored(range(len(before), SIZE * self.published), SIZE, before=before)
            self._publisher.publish(KVEventBatch(ts=0.0, events=[event]))

    def publish_nonsense(self) -> None:
        self._publisher.publish(KVEventBatch(ts=0.0, events=["no event"]))

    @property
    def sent(self) -> int:
        """Number of batches that the publisher's thread has sent, whether anybody has got them or not."""
        return len(self._publisher._buffer)

    @property
    def known(self) -> int:
        """Number of blocks of the prompt, from its beginning, that the index knows."""
        return self.index.longest(range(SIZE * self.published), None, None).get(self.blocks, 0) // SIZE

    @asynccontextmanager
    async def followed(self) -> AsyncIterator[EventFollower]:
        publisher, context = Publisher(self._events, self._replay), zmq.asyncio.Context()
        follower = EventFollower(context, publisher, self.index, self.blocks)
        task = asyncio.create_task(follower.run())
        try:
            yield follower
        finally:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
            context.destroy(linger=0)

    async def publish_until(self, condition: Callable[[], bool]) -> None:
        """Publish until a condition holds: nothing tells when a subscription has arrived."""
        async with asyncio.timeout(SECONDS):
            while not condition():
                self.publish()
                await asyncio.sleep(0.02)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(SECONDS):
        while not condition():  # noqa: ASYNC110 - the publisher's thread ends it
            await asyncio.sleep(0.01)


def lose(follower: EventFollower, engine: Engine, count: int) -> None:
    """Have the follower miss what is published next, as if the network had dropped it."""
    take, left = follower._take_live, count

    async def losing(frames: list[bytes]) -> None:
        nonlocal left
        left -= 1
        if left < 0:
            await take(frames)

    follower._take_live = losing
    engine.publish(count)


def run(scene: Callable[[], object]) -> None:
    asyncio.run(scene())


def test_what_was_published_before_the_router_came_is_replayed(tmp_path):
    async def scene() -> None:
        engine = Engine(tmp_path, replays=True)
        engine.publish(5)
        async with engine.followed() as follower:
            await until(lambda: engine.known == 5)
            await engine.publish_until(lambda: engine.known > 5)
            await until(lambda: engine.known == engine.published)
        assert follower.gaps == 0
        engine.stop()

    run(scene)


def test_without_replay_only_prompts_that_begin_later_are_known(tmp_path):
    async def scene() -> None:
        engine = Engine(tmp_path, replays=False)
        engine.publish(5)
        await until(lambda: engine.sent == 5)
        async with engine.followed() as follower:
            await engine.publish_until(lambda: follower._next > 5)
            assert len(engine.index) == 0
            engine.published = 0
            engine.publish(2)
            await until(lambda: engine.known == 2)
        engine.stop()

    run(scene)


def test_lost_events_are_replayed(tmp_path):
    async def scene() -> None:
        engine = Engine(tmp_path, replays=True)
        async with engine.followed() as follower:
            await engine.publish_until(lambda: engine.known > 0)
            await until(lambda: engine.known == engine.published)
            lose(follower, engine, 3)
            engine.publish()
            await until(lambda: engine.known == engine.published)
        assert follower.gaps == 0
        engine.stop()

    run(scene)


def test_an_engine_whose_lost_events_cannot_be_replayed_is_forgotten(tmp_path):
    async def scene(*, replays: bool) -> None:
        (folder := tmp_path / str(replays)).mkdir()
        engine = Engine(folder, replays=replays, keeps=2)
        async with engine.followed() as follower:
            await engine.publish_until(lambda: follower._next > 0)
            await until(lambda: follower._next == engine.published)
            engine.published = 0
            engine.publish()
            await until(lambda: engine.known == 1)
            lose(follower, engine, 4)
            engine.publish()
            await until(lambda: follower.gaps == 1)
            assert engine.known == len(engine.index) == 0
        engine.stop()

    run(lambda: scene(replays=False))
    run(lambda: scene(replays=True))


def test_an_engine_that_starts_anew_is_forgotten(tmp_path):
    async def scene() -> None:
        engine = Engine(tmp_path, replays=True)
        async with engine.followed() as follower:
            engine.publish(200)
            await until(lambda: engine.known == 200)
            engine.stop()
            engine.start()
            before, engine.published = engine.published, 0
            await engine.publish_until(lambda: 0 < len(engine.index) < before)
            await until(lambda: len(engine.index) == engine.known == engine.published)
        assert follower.gaps == 0
        engine.stop()

    run(scene)


def test_events_that_cannot_be_read_are_passed_over_and_said_once(tmp_path, caplog):
    async def scene() -> None:
        engine = Engine(tmp_path, replays=True)
        engine.publish_nonsense()
        engine.publish_nonsense()
        engine.publish(2)
        async with engine.followed():
            await until(lambda: engine.known == 2)
        engine.stop()

    run(scene)
    assert len(caplog.messages) == 1
    assert "are not those of vLLM" in caplog.text
