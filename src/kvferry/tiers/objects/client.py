"""Requests to object storage through obstore, each with a deadline.

Each call makes one request, and retries it a few times if that can help. It returns a value, raises
`FileNotFoundError` for a missing object, or raises `Unavailable` for any other failure.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cache
from itertools import chain
from typing import TYPE_CHECKING, cast
from urllib.parse import unquote, urlsplit

import obstore
from obstore import exceptions
from obstore.store import LocalStore, from_url

from kvferry.common.errors import ChunkError, ConfigError
from kvferry.tiers.format.chunk import Buffer
from kvferry.tiers.objects.faults import Fault, Unavailable, is_of_the_bucket, unavailable
from kvferry.tiers.objects.settings import StoreSettings, store_settings
from kvferry.tiers.paths import MARKER

if TYPE_CHECKING:
    from obstore.store import ClientConfig, ObjectStore as Store, RetryConfig, S3Config


# Size of the pieces of an answer. obstore copies each piece with Python's lock held.
_PIECE_BYTES = 1 << 19
# Number of objects on a page of a listing, for the same reason.
_LISTED = 200
_RETRIES = 2
_PAUSE_SECONDS = 0.05
# Maximum pause before a retry, as a share of the time limit of a request.
_PAUSE_SHARE = 0.1


@dataclass(slots=True)
class OpenObject:
    """An object whose content is being received: read its beginning, then fill memory with all the rest.

    Not thread-safe.

    >>> found = OpenObject(11, "", iter([b"head", b"er body"]))
    >>> body = bytearray(4)
    >>> found.read(0, 6)
    b'header'
    >>> found.fill(7, memoryview(body))  # the body begins at offset 7, after the space
    >>> body
    bytearray(b'body')
    """

    size: int  # length of the object in bytes
    etag: str  # tag that changes with the content; empty if the store has none
    # The content in order. It raises `Unavailable` if the request fails. A caller may stop early: then the
    # store sends no more than the data that is already on its way.
    pieces: Iterator[bytes]
    _start: bytearray = field(default_factory=bytearray, init=False, repr=False)

    def read(self, offset: int, size: int) -> bytes:
        """Return the `size` bytes at `offset`, or fewer if the object ends earlier."""
        while len(self._start) < offset + size:
            piece = next(self.pieces, None)
            if piece is None:
                break
            self._start += piece
        return bytes(memoryview(self._start)[offset : offset + size])

    def fill(self, offset: int, into: memoryview) -> None:
        """Fill `into` with all bytes from `offset`, up to which `read` has received all. Do not `read` later.

        Raise ChunkError if the object has another length.
        """
        done = 0
        received: list[bytes | memoryview] = [memoryview(self._start)[offset:]]
        for piece in chain(received, self.pieces):
            end = done + len(piece)
            if end > len(into):
                raise ChunkError(f"more than the {len(into)} bytes of a body")
            into[done:end] = piece
            done = end
        if done < len(into):
            raise ChunkError(f"a body that ends after {done} of {len(into)} bytes")


@dataclass(frozen=True, slots=True)
class ListedObject:
    """An object in a listing."""

    path: str  # path of the object below the client's URL
    size: int  # length of the object in bytes
    etag: str  # tag that changes with the content; empty if the store has none
    stored_ns: int  # time of storing, nanoseconds since 1970


class BucketClient:
    """A client for the objects under a URL. Every call blocks.

    Any thread may use it, but no forked process.

    Args:
        url: URL of scheme s3, gs, az or file. Paths of objects are relative to it.
        options: settings of the client, by option name of the obstore library.
        timeout_seconds: time limit for a call, for each page of a listing, and for each of the two steps of
            `move`. Each of two attempts of a request may take half of this time.

    Attributes:
        url: URL without a slash at its end.
        endpoint: configured server; None for the provider's own.

    Raises:
        ConfigError: the URL or the value of an option is invalid, an option is unknown, the endpoint is not
            encrypted and `allow_http` is not set, or the URL names a folder that the file tier uses.
    """

    def __init__(self, url: str, options: Mapping[str, str], timeout_seconds: float) -> None:
        found = store_settings(url, options)
        self.url, self.endpoint = found.url, found.endpoint
        self._half_seconds = timeout_seconds / 2
        try:
            self.store = _connect(found, self._half_seconds)
        except (exceptions.BaseError, ValueError, OSError) as error:
            raise ConfigError(f"object tier: {self.url}: {_redacted_message(error, options)}") from error
        _first_user()

    def put(self, path: str, pieces: Sequence[Buffer]) -> None:
        """Store an object completely or not at all. The consecutive `pieces` must not change meanwhile."""
        views = [memoryview(piece).cast("B") for piece in pieces]
        try:
            with _as_unavailable():
                # One request for any size. Measured, a multipart upload was no faster, and an abandoned one
                # leaves hidden parts in the bucket, which cost money.
                obstore.put(self.store, path, views, use_multipart=False)
        except FileNotFoundError as error:
            raise Unavailable(Fault.NO_BUCKET) from error
        finally:
            self._release_buffers(views)

    def head(self, path: str) -> tuple[int | None, str]:
        """Return the length in bytes and the ETag of an object; (None, "") if there is no such object."""
        try:
            with _as_unavailable():
                meta = obstore.head(self.store, path)
        except FileNotFoundError:
            return None, ""
        return meta["size"], _etag(meta["e_tag"])

    def get(self, path: str) -> OpenObject:
        """Request an object, and return it while its content is being received."""
        with _as_unavailable():
            # Never a byte range: some stores answer with the whole object.
            result = obstore.get(self.store, path)
            meta = result.meta
            return OpenObject(meta["size"], _etag(meta["e_tag"]), _pieces(result.stream(_PIECE_BYTES)))

    def list(self, prefix: str = "") -> Iterator[Sequence[ListedObject]]:
        """Yield the pages of a listing of all objects in a folder, in no particular order."""
        with _as_unavailable():
            for page in obstore.list(self.store, prefix or None, chunk_size=_LISTED):
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
        with _as_unavailable():
            obstore.rename(self.store, path, to)

    def remove(self, paths: Sequence[str]) -> None:
        """Remove objects, and ignore missing ones."""
        try:
            with _as_unavailable():
                obstore.delete(self.store, paths)
        except FileNotFoundError:
            # Some stores stop at the first missing object.
            for path in paths:
                with suppress(FileNotFoundError), _as_unavailable():
                    obstore.delete(self.store, path)

    def _release_buffers(self, views: Sequence[memoryview]) -> None:
        """Wait until no other thread reads the buffers of a request, then release their views."""
        # After a timeout, a thread of obstore may still be sending the buffers, usually for less than a
        # millisecond. Later it may send bytes that the caller has changed. This does no harm: a store keeps
        # no partial object, and readers reject an object whose digests do not match.
        until = time.monotonic() + self._half_seconds
        for view in views:
            while not _try_release(view) and time.monotonic() < until:
                time.sleep(0.0005)


@contextmanager
def _as_unavailable() -> Iterator[None]:
    """Convert errors of a request to FileNotFoundError or `Unavailable`."""
    if _first_user() != os.getpid():
        # A forked process does not have the client's threads, so a request would wait forever.
        raise Unavailable(Fault.FORKED)
    try:
        yield
    except FileNotFoundError as error:
        if is_of_the_bucket(error):
            raise unavailable(error) from error
        raise
    except (exceptions.BaseError, ValueError, OSError) as error:
        raise unavailable(error) from error


def _pieces(stream: Iterator[bytes]) -> Iterator[bytes]:
    with _as_unavailable():
        yield from stream


def _connect(found: StoreSettings, seconds: float) -> Store:
    """Create an obstore client, with `seconds` for each attempt of a request, and twice that for all."""
    if found.scheme == "file":
        path = unquote(urlsplit(found.url).path)
        if os.path.exists(f"{path}/{MARKER}"):
            raise ConfigError(
                f"object tier: {path} is a directory of the file tier; name another, or use that tier"
            )
        return LocalStore.from_url(found.url)
    pause = timedelta(seconds=seconds * _PAUSE_SHARE)
    # obstore checks names and values, which are texts. The timeout covers a whole request: to connect, to
    # send it, and to read the answer to its end.
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


def _redacted_message(error: Exception, options: Mapping[str, str]) -> str:
    """Return the text of an error about client settings, with names in place of options' values."""
    said = str(error).partition("\n\nDebug source")[0]
    for name, value in options.items():
        if value:
            said = said.replace(value, f"<{name}>")
    return said


def _try_release(view: memoryview) -> bool:
    try:
        view.release()
    except BufferError:
        return False
    return True


def _etag(etag: str | None) -> str:
    # Some stores quote ETags in answers but not in listings.
    return (etag or "").strip('"')


@cache
def _first_user() -> int:
    """Return the id of the process that first used object storage: an ancestor's, after a fork."""
    return os.getpid()
