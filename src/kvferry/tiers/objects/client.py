"""Requests to object storage through obstore, each with a deadline.

Each call makes one request and retries it a few times where that can help. It returns a value, or raises
`FileNotFoundError` for a missing object or `Unavailable`, and nothing else. It never requests part of an
object, since some stores answer with the whole object. The store does not send the unread rest of an answer,
apart from data already on its way.
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
        path: path below the bucket's URL.
        size: bytes of the object.
        etag: tag that changes with the content; empty if the store has none.
        stored_ns: time of storing, nanoseconds since 1970.
    """

    path: str
    size: int
    etag: str
    stored_ns: int


@dataclass(frozen=True, slots=True)
class OpenObject:
    """An object that is being read.

    Attributes:
        size: bytes of the object.
        etag: tag that changes with the content; empty if the store has none.
        pieces: iterator over the bytes, in pieces; raises `Unavailable`.
    """

    size: int
    etag: str
    pieces: Iterator[bytes]


class BucketClient:
    """Client for the objects under a URL. Every call blocks.

    Any thread of the process that made the client may use it.

    Args:
        url: URL of scheme s3, gs, az or file, with the path above all objects.
        options: client settings, as in `objects.options`.
        timeout_seconds: limit for a call, for each page of a listing, and for each of the two steps of
            `move`. One request has half of it, so that a request that failed at once can be retried.

    Attributes:
        url: the URL, without a slash at its end.
        endpoint: the configured server; None for the provider's own.

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
        """Store an object completely or not at all, replacing an object of the same name.

        An object of any size is one request. A multipart upload was no faster where that was measured. An
        abandoned one leaves hidden parts behind, which cost money.

        Args:
            path: path below the URL.
            pieces: consecutive buffers of the object, which are not copied.
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
        """Return the bytes of an object; None if it does not exist."""
        return self.head(path)[0]

    def head(self, path: str) -> tuple[int | None, str]:
        """Return the bytes and the ETag of an object; None for the bytes if it does not exist."""
        try:
            with _asking():
                meta = obstore.head(self._store, path)
        except FileNotFoundError:
            return None, ""
        return meta["size"], _etag(meta["e_tag"])

    def get(self, path: str) -> OpenObject:
        """Start to read an object."""
        with _asking():
            result = obstore.get(self._store, path)
            meta = result.meta
            return OpenObject(meta["size"], _etag(meta["e_tag"]), _pieces(result.stream(_PIECE_BYTES)))

    def list(self, prefix: str = "") -> Iterator[Sequence[ListedObject]]:
        """Yield all objects below a path, page by page, in no particular order."""
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
        """Rename an object within the store."""
        with _asking():
            obstore.rename(self._store, path, to)

    def remove(self, paths: Sequence[str]) -> None:
        """Remove objects, and ignore missing ones."""
        try:
            with _asking():
                obstore.delete(self._store, paths)
        except FileNotFoundError:
            # Some stores stop there.
            for path in paths:
                with suppress(FileNotFoundError), _asking():
                    obstore.delete(self._store, path)

    def _let_go(self, views: Sequence[memoryview]) -> None:
        """Wait until no thread reads the buffers of a request, for at most the time of one request.

        Another thread closes an abandoned connection, within a millisecond. If it takes longer than a request
        may, it could only send half an object, which no store keeps and no reader accepts.
        """
        until = time.monotonic() + self._half_seconds
        for view in views:
            while not _released(view) and time.monotonic() < until:
                time.sleep(0.0005)


@contextmanager
def _asking() -> Iterator[None]:
    """Raise the errors of a request as `FileNotFoundError` or `Unavailable`."""
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
    """Return a client whose requests take at most `seconds`, or twice that with retries."""
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
    """Return the text of a settings error, with names in place of values, some of which are secret."""
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
    """Return an ETag without quotes, which some stores use in answers but not in listings."""
    return (etag or "").strip('"')


@cache
def _first_user() -> int:
    """Return the id of the process that first used object storage: this process or an ancestor."""
    return os.getpid()
