"""kvferry with one of its protections switched off, inside an engine's process: a campaign must see it.

Nothing in kvferry can be told to do without a protection; here its code is replaced while an engine runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

from msgspec import structs

from kvferry.tiers.files.directory_index import DirectoryIndex
from kvferry.tiers.index import ListedKeys
from kvferry.transport.lease import LeaseWords
from kvferry.transport.redeem import PromptContent
from kvferry.transport.seal import SealBinding
from support.vllm_engine import on_the_way, parts
from support.vllm_engine.parts import half

_NAME_DIGITS = 64
"""Of a namespace's folder."""


@contextmanager
def _no_lease_words(engine: Any) -> Iterator[None]:
    # Digests are refused for a lease that has ended, and would differ.
    with ExitStack() as patched, on_the_way.unverified():
        for lane in parts.lanes(engine):
            patched.enter_context(mock.patch.object(lane, "_check_words", return_value=None))
        yield


@contextmanager
def _no_verification(engine: Any) -> Iterator[None]:
    with on_the_way.unverified():
        yield


@contextmanager
def _no_raised_words(engine: Any) -> Iterator[None]:
    """Blocks of leases that have ended are given back, and their words stay as they were."""
    kept: list[tuple[LeaseWords, list[int]]] = []
    end = LeaseWords.end
    with mock.patch.object(LeaseWords, "end", lambda words, slots: kept.append((words, [*slots]))):
        yield
    for words, slots in kept:
        end(words, slots)  # no later lease with one of these words would be valid


@contextmanager
def _no_image_words(engine: Any) -> Iterator[None]:
    """Images that were gathered are believed without a look at their word."""
    from kvferry.transport.segmented_read import SegmentedRead, _SegmentState

    land = SegmentedRead._land

    def lands(of: Any, chunk: Any) -> None:
        chunk.state = _SegmentState.READING
        land(of, chunk)

    with mock.patch.object(SegmentedRead, "_land", lands), on_the_way.unverified():
        yield


@contextmanager
def _no_peers(engine: Any) -> Iterator[None]:
    from kvferry.transport.addresses import AllowedPeers

    with mock.patch.object(AllowedPeers, "allows", return_value=True):
        yield


@contextmanager
def _no_weights(engine: Any) -> Iterator[None]:
    """The engine does not notice that its weights change."""
    from kvferry.connector.worker import StaleEpochs

    with (
        mock.patch.object(StaleEpochs, "on_weights_changed", return_value=None),
        mock.patch.object(LeaseWords, "invalidate_all", return_value=None),
    ):
        yield


@contextmanager
def _no_adapter(engine: Any) -> Iterator[None]:
    """Prompts are named as if they had no adapter."""
    from kvferry.connector.content import Adapters

    with mock.patch.object(Adapters, "name", return_value=""):
        yield


@contextmanager
def _no_digest(engine: Any) -> Iterator[None]:
    from kvferry.transport.redeem import _OpenTicket

    with mock.patch.object(_OpenTicket, "refusal", return_value=None):
        yield


@contextmanager
def _no_sealed_digest(engine: Any) -> Iterator[None]:
    """A sealed grant opens with any prompt."""
    encoded = SealBinding.encoded
    anybody = PromptContent("")
    with mock.patch.object(SealBinding, "encoded", lambda use: encoded(replace(use, content=anybody))):
        yield


@contextmanager
def _no_ticket(engine: Any) -> Iterator[None]:
    """Whatever ticket a consumer has, it gets the blocks of a prompt with the content that it states."""
    book = parts.tickets(engine)
    redeem = book.redeem

    def any_that_fits(asked: Any) -> Any:
        fits = [ticket for ticket, found in book._open.items() if found.refusal(asked) is None]
        return redeem(structs.replace(asked, ticket=fits[0]) if fits else asked)

    with mock.patch.object(book, "redeem", any_that_fits):
        yield


@contextmanager
def _no_pins(engine: Any) -> Iterator[None]:
    """Blocks are pinned for as long as their request waits for them, and no longer."""
    loads = half(engine).admission.loads
    given_back = set[str]()

    def release(self: Any, reports: Any, over: Any) -> None:
        # A late load's blocks go at once; what is then reported of it frees nothing, and counts as nothing.
        for load in list(self):
            if load.late and load.key not in given_back:
                given_back.add(load.key)
                self.pinned -= len(load.blocks)
                for blocks in (self._held, self._late):
                    blocks[load.holder] -= len(load.blocks)
                self._pool.free_blocks(reversed(load.blocks))
                load.blocks = ()
        released(self, reports, over)

    released = type(loads).release
    with mock.patch.object(type(loads), "release", release):
        yield


@contextmanager
def _no_checksum(engine: Any) -> Iterator[None]:
    from kvferry.tiers.files import chunk_file

    def unchecked(chunk: Any, header: Any, body: memoryview, wait: Callable[[int], object]) -> bool:
        wait(len(body))
        return True

    with mock.patch.object(chunk_file, "is_chunk", unchecked):
        yield


@contextmanager
def _no_fleet_digest(engine: Any) -> Iterator[None]:
    """Chunks that are read in other engines' host memory are believed."""
    from kvferry.tiers.fleet import tier

    with mock.patch.object(tier, "content_digest", return_value=mock.ANY):
        yield


@contextmanager
def _no_key(engine: Any) -> Iterator[None]:
    from kvferry.transport.listener import _Authenticator

    with mock.patch.object(_Authenticator, "_verdict", return_value=(b"200", b"OK")):
        yield


@contextmanager
def _no_salt(engine: Any) -> Iterator[None]:
    from kvferry.connector import content as prompt_content

    inner = prompt_content.ChunkKeys

    def unsalted(*args: Any, **kwargs: Any) -> Any:
        return inner(*args, **{**kwargs, "salt": ""})

    with mock.patch.object(prompt_content, "ChunkKeys", unsalted):
        yield


@contextmanager
def _no_namespace(engine: Any) -> Iterator[None]:
    """The engine finds the chunks of whatever weights in its directory that are not its own."""
    store = parts.queue_of(engine, "file").tier
    own = store._namespace
    folders = (path.name for path in Path(store._root).iterdir() if len(path.name) == _NAME_DIGITS)
    (other,) = {bytes.fromhex(name) for name in folders} - {own}
    _live_in(store, other)
    parts.prompts(engine)._epoch = ""  # a reset names chunks anew
    try:
        yield
    finally:
        _live_in(store, own)


def _live_in(store: Any, namespace: bytes) -> None:
    """Have a file tier find and store what is in this namespace."""
    store.keys.clear()
    store._namespace = namespace
    store._listed = ListedKeys(store.keys)
    store._index = DirectoryIndex(store._root, namespace, store._listed, store._clock)
    store.refresh()


MUTANTS: dict[str, Callable[[Any], Any]] = {
    "lease words": _no_lease_words,
    "verified transfers": _no_verification,
    "digest": _no_digest,
    "sealed digest": _no_sealed_digest,
    "ticket": _no_ticket,
    "pins": _no_pins,
    "raised words": _no_raised_words,
    "image words": _no_image_words,
    "checksum": _no_checksum,
    "fleet digest": _no_fleet_digest,
    "key": _no_key,
    "peers": _no_peers,
    "salt": _no_salt,
    "adapter": _no_adapter,
    "weights": _no_weights,
    "namespace": _no_namespace,
}
"""Each protection, and kvferry without it."""


def switch_off(engine: Any, protection: str) -> None:
    """Do without a protection from now on, if that is not so yet."""
    if getattr(engine, "mutant", None) is None:
        engine.mutant = MUTANTS[protection](engine)
        engine.mutant.__enter__()


def switch_on(engine: Any) -> None:
    """Do with it again."""
    mutant, engine.mutant = getattr(engine, "mutant", None), None
    if mutant is not None:
        mutant.__exit__(None, None, None)
