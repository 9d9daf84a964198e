"""Requests to object storage, through obstore, each with a deadline.

One call here is one request, repeated a few times where that can help. What became of it is a value, a
`FileNotFoundError` for an object that is not there, or `Unavailable`; nothing else is raised. Requests for
part of an object are not made: there are stores that answer them with the whole. What is not read of an
answer is not sent either, apart from what is on its way.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from typing import TYPE_CHECKING, cast
from urllib.parse import unquote, urlsplit

import obstore
from obstore import exceptions
from obstore.store import LocalStore, from_url

from kvferry.errors import ConfigError
from kvferry.tiers.format.checksum import Buffer
from kvferry.tiers.objects.faults import Fault, Unavailable, is_of_the_bucket, unavailable
from kvferry.tiers.objects.options import StoreSettings, store_settings
from kvferry.tiers.paths import MARKER

if TYPE_CHECKING:
    from obstore.store import ClientConfig, ObjectStore as Store, RetryConfig, S3Config

# Of an answer, as much as is handed over at once, with Python's lock held.
_PIECE_BYTES = 1 << 19
# Of a listing, the same: objects.
_LISTED = 200
_RETRIES = 2
_PAUSE_SECONDS = 0.05
# The longest pause, of the time that a request has.
_PAUSE_SHARE = 0.1


@dataclass(frozen=True, slots=True)
class ListedObject:
    """An object as a listing shows it.

    Attributes:
        path: below the bucket's URL.
        size: bytes.
        etag: changes with its content; empty if the store has none.
        stored_ns: when it was stored, nanoseconds since 1970.
    """

    path: str
    size: int
    etag: str
    stored_ns: int


@dataclass(frozen=True, slots=True)
class OpenObject:
    """An object that is being read.

    Attributes:
        size: bytes.
        etag: changes with its content; empty if the store has none.
        pieces: its bytes, in pieces. Raises `Unavailable`.
    """

    size: int
    etag: str
    pieces: Iterator[bytes]


class BucketClient:
    """Objects under a URL. Any thread may use it, in the process that made it. Everything blocks.

    Args:
        url: s3://, gs://, az:// or file://, with the path below which everything lies.
        options: see `objects.options`.
        timeout_seconds: how long a call may take; of a listing, each page; of `move`, each of two steps. One
            request has half of that, so that one that failed at once can be repeated in what is left.

    Attributes:
        url: without a slash at its end.
        endpoint: the server; None for the provider's own.

    Raises:
        ConfigError: the URL or an option cannot be used.
    """

    def __init__(self, url: str, options: Mapping[str, str], timeout_seconds: float) -> None:
        found = store_settings(url, options)
        self.url, self.endpoint = found.url, found.endpoint
        self._half_seconds = timeout_seconds / 2
        try:
            self._store = _connect(found, self._half_seconds)
        except (exceptions.BaseError, ValueError, OSError) as error:
            raise ConfigError(f"object tier: {self.url}: {_said(error, options)}") from error
        _first_user()

    def put(self, path: str, pieces: Sequence[Buffer]) -> None:
        """Store an object, replacing what has its name: all at once, or not at all.

        It is one request, whatever its size: sent in parts, each with a deadline of its own, it was no faster
        where that was measured, and one that is given up leaves parts behind, which do not show and cost.

        Args:
            path: below the URL.
            pieces: what it consists of, one after another; not copied.
        """
        views = [memoryview(piece).cast("B") for piece in pieces]
        try:
            with _asking():
                obstore.put(self._store, path, views, use_multipart=False)
        except FileNotFoundError as error:
            raise Unavailable(Fault.NO_BUCKET) from error
        finally:
            self._let_go(views)

    def size(self, path: str) -> int | None:
        """Bytes of an object; None where there is none."""
        return self.look(path)[0]

    def look(self, path: str) -> tuple[int | None, str]:
        """Bytes and tag of an object; None where there is none."""
        try:
            with _asking():
                meta = obstore.head(self._store, path)
        except FileNotFoundError:
            return None, ""
        return meta["size"], _etag(meta["e_tag"])

    def get(self, path: str) -> OpenObject:
        """Begin to read an object."""
        with _asking():
            result = obstore.get(self._store, path)
            meta = result.meta
            return OpenObject(meta["size"], _etag(meta["e_tag"]), _pieces(result.stream(_PIECE_BYTES)))

    def list(self, prefix: str = "") -> Iterator[Sequence[ListedObject]]:
        """Everything below a path, page by page, in no order."""
        with _asking():
            for page in obstore.list(self._store, prefix or None, chunk_size=_LISTED):
                yield [
                    ListedObject(
                        one["path"],
                        one["size"],
                        _etag(one["e_tag"]),
                        int(one["last_modified"].timestamp() * 1e9),
                    )
                    for one in page
                ]

    def move(self, path: str, to: str) -> None:
        """Give an object another name, in the store."""
        with _asking():
            obstore.rename(self._store, path, to)

    def remove(self, paths: Sequence[str]) -> None:
        """Remove objects; those that are not there are no error."""
        try:
            with _asking():
                obstore.delete(self._store, paths)
        except FileNotFoundError:
            # Some stores stop there.
            for path in paths:
                with suppress(FileNotFoundError), _asking():
                    obstore.delete(self._store, path)

    def _let_go(self, views: Sequence[memoryview]) -> None:
        """Wait until nothing reads what was given to be sent.

        A connection that was given up is closed by another thread, within a millisecond. Should it take
        longer than a request may: what would still be sent is half an object, which no store keeps, and no
        reader believes.
        """
        until = time.monotonic() + self._half_seconds
        for view in views:
            while not _released(view) and time.monotonic() < until:
                time.sleep(0.0005)


@contextmanager
def _asking() -> Iterator[None]:
    """Errors of a request as they are raised here."""
    if _first_user() != os.getpid():
        # The threads of the client stayed behind: a request would wait forever.
        raise Unavailable(Fault.FORKED)
    try:
        yield
    except FileNotFoundError as error:
        if is_of_the_bucket(error):
            raise Unavailable(Fault.NO_BUCKET) from error
        raise
    except (exceptions.BaseError, ValueError, OSError) as error:
        raise unavailable(error) from error


def _pieces(stream: Iterator[bytes]) -> Iterator[bytes]:
    with _asking():
        yield from stream


def _connect(found: StoreSettings, seconds: float) -> Store:
    """A client whose requests take no longer than `seconds`, nor twice that with what is repeated."""
    if found.scheme == "file":
        return _folder(found.url)
    pause = timedelta(seconds=seconds * _PAUSE_SHARE)
    # Names and values are texts, which obstore checks. The timeout is for all of a request: to connect, to
    # send and to read the answer to its end.
    client = cast("ClientConfig", found.client) | {
        "connect_timeout": timedelta(seconds=seconds / 2),
        "timeout": timedelta(seconds=seconds),
    }
    retry: RetryConfig = {
        "max_retries": _RETRIES,
        "retry_timeout": timedelta(seconds=seconds) - pause,
        "backoff": {"init_backoff": min(timedelta(seconds=_PAUSE_SECONDS), pause), "max_backoff": pause},
    }
    config = cast("S3Config", found.store)
    return from_url(found.url, config=config, client_options=client, retry_config=retry)


def _folder(url: str) -> LocalStore:
    path = unquote(urlsplit(url).path)
    if os.path.exists(f"{path}/{MARKER}"):
        raise ConfigError(
            f"object tier: {path} is a directory of the file tier; name another, or use that tier"
        )
    return LocalStore.from_url(url)


def _said(error: Exception, options: Mapping[str, str]) -> str:
    """What is wrong with settings: which they are, not their values, some of which are secret."""
    said = str(error).partition("\n\nDebug source")[0]
    for name, value in options.items():
        if value:
            said = said.replace(value, f"<{name}>")
    return said


def _released(view: memoryview) -> bool:
    try:
        view.release()
    except BufferError:
        return False
    return True


def _etag(etag: str | None) -> str:
    """Some stores quote it in answers and not in listings."""
    return (etag or "").strip('"')


@cache
def _first_user() -> int:
    """The process that first used object storage: this one, or one from which it was forked."""
    return os.getpid()
