"""The directory of a fleet: a Valkey or Redis server that says which engine has which chunk in host memory.

    engine:NAMESPACE:RUN   the address of an engine's fleet channel, for `RUN_SECONDS`; renewed while it runs
    chunk:NAMESPACE:KEY    a set of runs of engines, for `CHUNK_SECONDS` after the newest was added

`RUN` is a random number of each run of an engine, in 8 bytes. `NAMESPACE` and `KEY` are the first bytes of
the namespace's digest and of the chunk's key, with the key's last byte, the group. So what an ended run has
left behind names nobody.

Nothing here is trusted: a holder is asked before it is read, and the digest decides. If the server is lost,
slow or lies, only hits are lost. One thread publishes what enters and leaves host memory, and another asks.
"""

from __future__ import annotations

import itertools
import logging
import queue
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import valkey

from kvferry.common.errors import ConfigError
from kvferry.common.limited_log import LimitedLog
from kvferry.common.threads import Thread
from kvferry.transport.addresses import engine_text, parse_engine
from kvferry.transport.handshake import Address

logger = logging.getLogger(__name__)

RUN_SECONDS = 15
CHUNK_SECONDS = 3600
# Chunks are published again before their entries expire.
_AGAIN_SECONDS = CHUNK_SECONDS / 2
_PUBLISH_SECONDS = 0.1
_MOST_COMMANDS = 2000  # maximum number of commands in one batch
_SHORTEST_PAUSE, _LONGEST_PAUSE = 1.0, 30.0
_MOST_LOOK_UPS = 64  # maximum number of look-ups that wait; further ones find nothing
_RUN_BYTES = 8
_PREFIX = b"kvferry:"

# An entry that entered (True) or left (False) host memory; None if all have left.
Change = tuple[bytes, bool] | None


def without_password(url: str) -> str:
    """Return a URL for messages.

    >>> without_password("valkey://me:secret@10.0.0.9:6379/1")
    'valkey://10.0.0.9:6379/1'
    """
    parts = urlsplit(url)
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))


def connect(url: str, seconds: float) -> Any:
    """Return a client of a directory, which connects with its first command.

    Raises:
        ConfigError: the URL is malformed.
    """
    # The client knows no other names of the same protocol. Its annotations are those of texts only.
    text = url.replace("redis", "valkey", 1) if url.startswith("redis") else url
    try:
        return valkey.Valkey.from_url(
            text, socket_timeout=seconds, socket_connect_timeout=seconds, retry_on_timeout=False
        )
    except ValueError as error:
        raise ConfigError(f"fleet tier: directory {without_password(url)}: {error}") from error


def ping(url: str, seconds: float) -> str:
    """Return why a directory does not answer; empty if it does. Raise ConfigError if the URL is malformed."""
    client = connect(url, seconds)
    try:
        client.ping()
    except (valkey.ValkeyError, OSError) as error:
        return str(error)
    finally:
        client.close()
    return ""


class _Breaker:
    """Leaves a server alone for a while after a failure, longer each time. Only one thread may use it."""

    def __init__(self, what: str, url: str, clock: Callable[[], float]) -> None:
        self._what, self._url, self._clock = what, without_password(url), clock
        self._log = LimitedLog(logger, clock=clock)
        self._failures, self._until = 0, 0.0

    @property
    def open(self) -> bool:
        return self._clock() < self._until

    def on_success(self) -> None:
        if self._failures:
            logger.info("fleet tier: directory %s answers again", self._url)
        self._failures = 0

    def on_failure(self, error: Exception) -> None:
        self._failures += 1
        pause = min(_SHORTEST_PAUSE * 2 ** min(self._failures - 1, 10), _LONGEST_PAUSE)
        self._until = self._clock() + pause
        self._log.say(
            "directory",
            f"fleet tier: {self._what} at the directory {self._url} failed ({error}); chunks of engines that "
            f"only the directory knows are not found until it answers, which is tried again in {pause:g} s",
        )


class Directory:
    """The directory, as one engine uses it: two threads. `find` may be called by any thread.

    Args:
        url: of the server.
        namespace: digest of the namespace of this engine's chunks.
        address: address of this engine's fleet channel, for others.
        held: returns the keys of all chunks in host memory. Called by a thread.
        changes: what enters and leaves host memory, in this order. The owner of host memory appends.
        find_seconds: timeout of a look-up.
    """

    def __init__(
        self,
        url: str,
        namespace: bytes,
        address: Address,
        *,
        held: Callable[[], Iterable[bytes]],
        changes: deque[Change],
        find_seconds: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.run = secrets.token_bytes(_RUN_BYTES)
        self._clock, self._held, self._changes = clock, held, changes
        self._of = namespace[:8]
        self._address = engine_text(address)
        self._publisher, self._seeker = connect(url, 2.0), connect(url, find_seconds)
        self._publishing, self._seeking = (
            _Breaker(what, url, clock) for what in ("publishing", "looking up")
        )
        self._look_ups: queue.Queue[tuple[Sequence[bytes], Callable[[_Found], None]] | None] = queue.Queue(
            _MOST_LOOK_UPS
        )
        # Addresses of runs, and until when they are used without asking again.
        self._runs: dict[bytes, tuple[Address | None, float]] = {}
        self._stop = threading.Event()
        self._threads = [
            Thread(target, f"kvferry-fleet-{name}")
            for name, target in (("publish", self._publish), ("find", self._seek))
        ]
        for thread in self._threads:
            thread.start()

    def find(self, keys: Sequence[bytes], done: Callable[[_Found], None]) -> None:
        """Look up the holders of chunks. `done` is called once, with nothing if the directory fails."""
        try:
            self._look_ups.put_nowait((keys, done))
        except queue.Full:
            done({})

    def close(self) -> None:
        """Take this run out of the directory, and end the threads."""
        self._stop.set()
        self._look_ups.put(None)
        for thread in self._threads:
            thread.join()
        self._publisher.close()
        self._seeker.close()

    # -- the thread that publishes ------------------------------------------------------------------------

    def _publish(self) -> None:
        told_at, renew_at = -float("inf"), -float("inf")
        while not self._stop.wait(_PUBLISH_SECONDS):
            if self._publishing.open:
                self._changes.clear()  # all is published anew afterwards
                told_at = -float("inf")
                continue
            try:
                now = self._clock()
                if now >= renew_at:
                    name = self._run_name(self.run)
                    if self._publisher.set(name, self._address, ex=RUN_SECONDS, get=True) is None:
                        told_at = -float("inf")  # the server has started anew, and forgotten the chunks
                    renew_at = now + RUN_SECONDS / 3
                if now - told_at > _AGAIN_SECONDS:
                    # Before the keys are listed: what enters meanwhile is in the changes.
                    self._changes.clear()
                    self._send((key, True) for key in self._held())
                    told_at = now
                elif self._changes:
                    self._send_changes()
                self._publishing.on_success()
            except (valkey.ValkeyError, OSError) as error:
                self._publishing.on_failure(error)
                renew_at = -float("inf")
            except Exception:
                logger.exception("fleet tier: publishing at the directory")
        try:
            self._publisher.delete(self._run_name(self.run))
        except (valkey.ValkeyError, OSError) as error:
            logger.debug("fleet tier: leaving the directory: %s", error)

    def _send_changes(self) -> None:
        latest: dict[bytes, bool] = {}
        for _ in range(len(self._changes)):
            change = self._changes.popleft()
            if change is None:
                # All that this run has published is void at once: it goes on under another number.
                self._publisher.delete(self._run_name(self.run))
                self.run = secrets.token_bytes(_RUN_BYTES)
                self._publisher.set(self._run_name(self.run), self._address, ex=RUN_SECONDS)
                latest.clear()
            else:
                key, entered = change
                latest[key] = entered
        self._send(latest.items())

    def _send(self, changes: Iterable[tuple[bytes, bool]]) -> None:
        for batch in _batched(changes, _MOST_COMMANDS // 2):
            pipe = self._publisher.pipeline(transaction=False)
            for key, entered in batch:
                name = self._chunk_name(key)
                if entered:
                    pipe.sadd(name, self.run)
                    pipe.expire(name, CHUNK_SECONDS)
                else:
                    pipe.srem(name, self.run)
            pipe.execute()

    # -- the thread that asks -----------------------------------------------------------------------------

    def _seek(self) -> None:
        while (wanted := self._look_ups.get()) is not None:
            keys, done = wanted
            found: _Found = {}
            try:
                if not self._seeking.open:
                    found = self._look_up(keys)
                    self._seeking.on_success()
            except (valkey.ValkeyError, OSError) as error:
                self._seeking.on_failure(error)
            except Exception:
                logger.exception("fleet tier: looking up at the directory")
            done(found)

    def _look_up(self, keys: Sequence[bytes]) -> _Found:
        runs_of: list[Any] = []
        for batch in _batched(keys, _MOST_COMMANDS):
            pipe = self._seeker.pipeline(transaction=False)
            for key in batch:
                pipe.smembers(self._chunk_name(key))
            # Another program may use the names for something else: then the entry is an error.
            runs_of += [
                runs if isinstance(runs, set | list) else () for runs in pipe.execute(raise_on_error=False)
            ]
        self._resolve(set().union(*runs_of) if runs_of else set())
        found: dict[Address, list[bytes]] = {}
        for key, runs in zip(keys, runs_of, strict=True):
            for run in runs:
                address, _ = self._runs.get(run, (None, 0.0))
                if address is not None:
                    found.setdefault(address, []).append(key)
        return found

    def _resolve(self, runs: set[Any]) -> None:
        """Have `_runs` say the addresses of runs, all but this engine's own."""
        now = self._clock()
        self._runs = {run: known for run, known in self._runs.items() if now < known[1]}
        unknown = [
            run for run in runs if isinstance(run, bytes) and run not in self._runs and run != self.run
        ]
        if unknown:
            for run, text in zip(
                unknown, self._seeker.mget([self._run_name(run) for run in unknown]), strict=True
            ):
                address = parse_engine(text.decode("ascii", "replace")) if isinstance(text, bytes) else None
                self._runs[run] = address, now + RUN_SECONDS / 3

    def _run_name(self, run: bytes) -> bytes:
        return _PREFIX + b"engine:" + self._of + run

    def _chunk_name(self, key: bytes) -> bytes:
        return _PREFIX + b"chunk:" + self._of + key[:15] + key[-1:]


_Found = Mapping[Address, Sequence[bytes]]


def _batched(items: Iterable[Any], size: int) -> Iterator[list[Any]]:
    each = iter(items)
    while batch := list(itertools.islice(each, size)):
        yield batch
