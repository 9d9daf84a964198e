"""Tests that every storage tier must pass, for pytest. Subclass `StorageTierContract` in a test module.

A method that begins with ``test`` is one sentence about the contract of `StorageTier` and `StorageSettings`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import ClassVar

from kvferry.common.errors import ChunkError, ConfigError, KVFerryError
from kvferry.keys.namespace import Namespace
from kvferry.tiers.files.chunk_file import whole_pages
from kvferry.tiers.format.chunk import Chunk, ChunkGroup, ChunkSection
from kvferry.tiers.index import KeyTable
from kvferry.tiers.names import GetOutcome, Medium, PutOutcome
from kvferry.tiers.storage_tier import StorageSettings, StorageTier

_SECTIONS = (ChunkSection("k", 4, 7 << 10), ChunkSection("v", 4, 7 << 10))
_GROUP, _OTHER_GROUP = ChunkGroup("full", 64, _SECTIONS), ChunkGroup("window", 64, _SECTIONS)


def _namespace(weights: str) -> Namespace:
    return Namespace.of(
        weights=weights, model={}, dtype="bfloat16", kv_dtype="auto", scales={}, form=["chunks"], name="m"
    )


_NAMESPACE, _OTHER_NAMESPACE = _namespace("0123"), _namespace("4567")


def _key(number: int) -> bytes:
    return number.to_bytes(20, "big")


def _body(number: int, group: ChunkGroup = _GROUP) -> memoryview:
    chunk = Chunk(_NAMESPACE.digest, _key(number), (group,))
    body = whole_pages(chunk.body_bytes)
    body[:] = b"\xee" * len(body)
    for index, part in enumerate(_parts(chunk, body)):
        part[:] = bytes([16 * number + index]) * len(part)
    return body


def _parts(chunk: Chunk, body: memoryview) -> list[memoryview]:
    starts = [offset - chunk.offsets[0] for offset in chunk.offsets]
    return [body[at : at + one.total_bytes] for at, one in zip(starts, chunk.sections, strict=True)]


def _fetch(tier: StorageTier, number: int, group: ChunkGroup = _GROUP) -> GetOutcome:
    right = _body(number, group)
    into = whole_pages(len(right))
    into[:] = bytes(len(into))
    done = tier.get(_key(number), group, into)
    chunk = Chunk(_NAMESPACE.digest, _key(number), (group,))
    assert done is not GetOutcome.HIT or _parts(chunk, into) == _parts(chunk, right)
    return done


def _error_of(kind: type[KVFerryError], call: Callable[[], object]) -> str:
    try:
        call()
    except kind as error:
        return str(error)
    raise AssertionError(f"no {kind.__name__}")


class StorageTierContract:
    """The tests of one kind of storage tier. A subclass sets the attributes and defines the two methods.

    Attributes:
        unusable: settings that `check` accepts, but with which nothing can be opened.
        has_trial: whether the kind has `try_out`. Kinds of other packages must have it.
    """

    kind: ClassVar[type[StorageSettings]]
    unusable: ClassVar[StorageSettings]
    has_trial: ClassVar[bool] = True

    def settings(self, folder: Path) -> StorageSettings:
        """Return the settings of a tier whose storage is in an empty folder, or stands for it."""
        raise NotImplementedError

    def damage(self, folder: Path) -> None:
        """Change one byte of every chunk in the storage of a folder, so that its checksum is wrong."""
        raise NotImplementedError

    @contextmanager
    def opened(self, folder: Path, namespace: Namespace = _NAMESPACE) -> Iterator[StorageTier]:
        """Open the tier of a folder, and close it twice."""
        tier = self.settings(folder).open(namespace, KeyTable(), [])
        try:
            yield tier
        finally:
            tier.close()
            tier.close()

    def test_the_kind_is_complete(self) -> None:
        assert re.fullmatch("[a-z][a-z0-9_]*", self.kind.kind), "a dot separates the number of a second tier"
        assert isinstance(self.kind.medium, Medium)
        needed = {"check", "check_storage", "location", "open"}
        needed |= {"trial_seconds", "try_out"} if self.has_trial else set()
        assert needed <= set(vars(self.kind)), "methods of StorageSettings that a kind must define"

    def test_two_locations_differ_and_one_is_equal(self, tmp_path: Path) -> None:
        here, again = self.settings(tmp_path).location, self.settings(tmp_path).location
        assert here == again != self.settings(tmp_path / "other").location
        assert str(tmp_path) in here.text

    def test_storage_that_can_be_used_passes_its_check_and_is_left_as_it_was(self, tmp_path: Path) -> None:
        self.settings(tmp_path).check("tiers[0]")
        self.settings(tmp_path).check_storage()
        assert not list(tmp_path.iterdir())

    def test_storage_that_cannot_be_used_is_an_error_with_advice(self) -> None:
        self.unusable.check("tiers[0]")
        said = _error_of(ConfigError, lambda: self.unusable.open(_NAMESPACE, KeyTable(), []))
        assert re.match(f"{self.kind.kind} tier: .*; ", said), "who, what, and after a semicolon the remedy"

    def test_a_trial_says_whether_the_storage_can_be_used_and_leaves_nothing(self, tmp_path: Path) -> None:
        if not self.has_trial:
            return
        assert self.settings(tmp_path).trial_seconds > 0
        assert self.settings(tmp_path).try_out().advice == ""
        assert not list(tmp_path.iterdir())
        with suppress(ConfigError):
            assert self.unusable.try_out().advice

    def test_a_stored_chunk_is_found_by_every_engine_of_its_namespace(self, tmp_path: Path) -> None:
        with self.opened(tmp_path) as tier, self.opened(tmp_path) as other:
            assert not tier.contains([_key(1)])[0]
            assert _fetch(tier, 1) is GetOutcome.ABSENT
            assert tier.put(_key(1), _GROUP, _body(1)) is PutOutcome.STORED
            assert tier.put(_key(1), _GROUP, _body(1)) is PutOutcome.PRESENT
            assert tier.contains([_key(1), _key(2)]).tolist() == [True, False]
            assert (_fetch(tier, 1), _fetch(other, 1)) == (GetOutcome.HIT, GetOutcome.HIT)
        with self.opened(tmp_path) as later:
            assert later.contains([_key(1), _key(2)]).tolist() == [True, False]
            later.mark_used([_key(1), _key(2)])
            later.usage()
        with self.opened(tmp_path, _OTHER_NAMESPACE) as stranger:
            assert not stranger.contains([_key(1)])[0]
            assert _fetch(stranger, 1) is GetOutcome.ABSENT

    def test_outcomes_are_counted(self, tmp_path: Path) -> None:
        with self.opened(tmp_path) as tier:
            for _ in range(2):
                tier.put(_key(1), _GROUP, _body(1))
            _fetch(tier, 1)
            _fetch(tier, 2)
            assert tier.stats.puts == {PutOutcome.STORED: 1, PutOutcome.PRESENT: 1}
            assert tier.stats.gets == {GetOutcome.HIT: 1, GetOutcome.ABSENT: 1}
            assert tier.stats.stored_bytes > len(_body(1)), "header and body"

    def test_a_corrupt_chunk_is_a_miss_and_can_be_stored_anew(self, tmp_path: Path) -> None:
        # A tier that keeps the bad bytes answers PRESENT to every store, and never serves the chunk again.
        with self.opened(tmp_path) as tier, self.opened(tmp_path) as other:
            tier.put(_key(1), _GROUP, _body(1))
            self.damage(tmp_path)
            assert _fetch(tier, 1) is GetOutcome.CORRUPT
            assert not tier.contains([_key(1)])[0]
            tier.refresh()
            assert tier.put(_key(1), _GROUP, _body(1)) is PutOutcome.STORED
            assert (_fetch(tier, 1), _fetch(other, 1)) == (GetOutcome.HIT, GetOutcome.HIT)

    def test_a_chunk_of_another_group_is_a_miss(self, tmp_path: Path) -> None:
        with self.opened(tmp_path) as tier:
            tier.put(_key(1), _GROUP, _body(1))
            assert _fetch(tier, 1, _OTHER_GROUP) is GetOutcome.OTHER_SHAPE
            assert not tier.contains([_key(1)])[0]

    def test_memory_of_another_length_is_refused(self, tmp_path: Path) -> None:
        with self.opened(tmp_path) as tier:
            _error_of(ChunkError, lambda: tier.put(_key(1), _GROUP, _body(1)[:-1]))
            _error_of(ChunkError, lambda: tier.get(_key(1), _GROUP, whole_pages(4096)))
            assert not tier.stats.puts
            assert not tier.stats.gets
