"""What somebody leaves in a directory of the file tier: none of it is waited for, followed or believed."""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from kvferry.common.errors import ConfigError
from kvferry.tiers.admin import cache_totals, namespace_usage, verify_all
from kvferry.tiers.files.admin import DirectoryAdmin
from kvferry.tiers.files.ledger import read_ledger
from kvferry.tiers.names import GetOutcome, PutOutcome
from support.chunk_files import key
from support.stores import FILE_BYTES, NAMESPACE, fetch, file_of, keep, open_store, temporaries

CAPACITY = 1 << 20
SPACE = NAMESPACE.digest.hex()

# Something that waits for a pipe waits for ever.
pytestmark = pytest.mark.timeout(60)


def a_link(path: Path, outside: Path) -> None:
    path.symlink_to(outside / "file")


def a_link_to_a_folder(path: Path, outside: Path) -> None:
    path.symlink_to(outside)


def a_link_to_nothing(path: Path, outside: Path) -> None:
    path.symlink_to(outside / "nothing")


def a_link_to_itself(path: Path, _: Path) -> None:
    path.symlink_to(path)


def a_pipe(path: Path, _: Path) -> None:
    os.mkfifo(path)


def a_socket(path: Path, outside: Path) -> None:
    # Names of sockets are short.
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(f"/proc/self/fd/{(folder := os.open(path.parent, os.O_PATH))}/s")
        (path.parent / "s").rename(path)
        os.close(folder)


def a_device(path: Path, _: Path) -> None:
    try:
        os.mknod(path, 0o600 | stat.S_IFCHR, os.makedev(1, 5))  # endless zeros
    except PermissionError:
        pytest.skip("devices cannot be made here")


def a_folder(path: Path, _: Path) -> None:
    path.mkdir()


def a_full_folder(path: Path, _: Path) -> None:
    path.mkdir()
    (path / "mine").write_text("kept")


def a_sparse_file(path: Path, _: Path) -> None:
    with path.open("wb") as file:
        file.truncate(1 << 40)


def a_hard_link(path: Path, outside: Path) -> None:
    os.link(outside / "file", path)


def an_empty_file(path: Path, _: Path) -> None:
    path.touch()


FOLDERS = [a_folder, a_full_folder]
LINKS = [a_link, a_link_to_a_folder, a_link_to_nothing, a_link_to_itself]
ODD = [a_pipe, a_socket, a_device]
FILES = [a_sparse_file, a_hard_link, an_empty_file]
Plant = Callable[[Path, Path], None]


@pytest.fixture
def outside(tmp_path_factory):
    """A folder beside the cache, with a file; nothing of it changes."""
    folder = tmp_path_factory.mktemp("outside")
    (folder / "file").write_bytes(b"not of the cache" * 10_000)
    os.utime(folder / "file", (1e9, 1e9))
    before = seen(folder)
    yield folder
    assert seen(folder) == before


def seen(folder: Path) -> list[tuple[str, bytes, float]]:
    return [(one.name, one.read_bytes(), one.stat().st_mtime) for one in sorted(folder.iterdir())]


@pytest.fixture
def cache(tmp_path):
    path = tmp_path / "cache"
    path.mkdir(mode=0o700)
    return path


def sound(path: Path) -> None:
    """What must hold whatever was planted, once it was opened anew."""
    for number in range(12):
        store = open_store(path)
        assert fetch(store, number)[0] in (GetOutcome.ABSENT, GetOutcome.CORRUPT) or fetch(store, number) == (
            GetOutcome.HIT,
            True,
        )
    assert keep(store, 30) is PutOutcome.STORED
    assert fetch(store, 30) == (GetOutcome.HIT, True)
    assert read_ledger(str(path)) == (CAPACITY, owned(path))
    assert owned(path) <= CAPACITY
    assert not [one for one in temporaries(path) if one.is_file() and not one.is_symlink()]


def owned(path: Path) -> int:
    """Bytes of all that is kvferry's: files, and links where bad files are."""
    found = 0
    for one in path.rglob("*"):
        status = one.lstat()
        link = stat.S_ISLNK(status.st_mode) and one.parent.name == "quarantine"
        ours = not one.name.startswith(("mine", "odd"))
        found += status.st_size if ours and (link or stat.S_ISREG(status.st_mode)) else 0
    return found


@pytest.mark.parametrize("plant", LINKS + ODD + FOLDERS + FILES)
def test_planted_chunk_is_moved_aside(cache, outside, plant: Plant):
    store = open_store(cache, capacity=CAPACITY)
    keep(store, 1)
    file_of(cache, 2).parent.mkdir()
    plant(file_of(cache, 2), outside)
    store.refresh()
    assert store.contains([key(2)]).tolist() == [True]
    if plant is not a_hard_link:  # the time of one is that of the other
        store.mark_used([key(2)])
    assert fetch(store, 2)[0] is GetOutcome.CORRUPT
    assert store.stats.quarantined == 1
    assert not os.path.lexists(file_of(cache, 2))
    assert keep(store, 2) is PutOutcome.STORED
    assert fetch(store, 2) == (GetOutcome.HIT, True)
    sound(cache)


@pytest.mark.parametrize("plant", LINKS + ODD)
def test_store_replaces_a_planted_chunk(cache, outside, plant: Plant):
    store = open_store(cache, capacity=CAPACITY)
    file_of(cache, 2).parent.mkdir()
    plant(file_of(cache, 2), outside)
    assert keep(store, 2) is PutOutcome.STORED
    assert fetch(store, 2) == (GetOutcome.HIT, True)
    sound(cache)


@pytest.mark.parametrize("plant", LINKS + ODD + [an_empty_file, a_hard_link])
def test_planted_folder_of_chunks_costs_only_its_chunks(cache, outside, plant: Plant):
    store = open_store(cache, capacity=CAPACITY)
    keep(store, 1)
    plant(file_of(cache, 2).parent, outside)
    (outside / file_of(cache, 2).name).touch()
    try:
        for at in range(2):
            assert store.contains([key(1), key(2)]).tolist() == [True, False]
            store.mark_used([key(1), key(2)])
            assert keep(store, 2) is PutOutcome.IO_ERROR
            assert fetch(store, 2)[0] is GetOutcome.IO_ERROR
            assert fetch(store, 1) == (GetOutcome.HIT, True)
            assert keep(store, 3 + at) is PutOutcome.STORED
            store.refresh()
            store.usage()
    finally:
        (outside / file_of(cache, 2).name).unlink()


@pytest.mark.parametrize("plant", LINKS + ODD + [an_empty_file])
def test_planted_namespace_folder_is_refused(cache, outside, plant: Plant):
    open_store(cache, capacity=CAPACITY)
    (cache / SPACE / "namespace.json").unlink()
    (cache / SPACE).rmdir()
    plant(cache / SPACE, outside)
    with pytest.raises(
        ConfigError, match=f"expected a plain folder .*{SPACE}.*see to its owner, mode and mount"
    ):
        open_store(cache)


@pytest.mark.parametrize("plant", LINKS)
def test_a_folder_of_a_namespace_that_becomes_a_link_is_not_followed(cache, outside, plant: Plant):
    store = open_store(cache, capacity=CAPACITY)
    keep(store, 1)
    (cache / SPACE).rename(cache / "away")
    plant(cache / SPACE, outside)
    store.mark_used([key(1)])
    assert keep(store, 2) is PutOutcome.IO_ERROR
    assert fetch(store, 1)[0] in (GetOutcome.IO_ERROR, GetOutcome.ABSENT)
    store.refresh()
    assert not store.contains([key(1)]).any()
    (cache / SPACE).unlink()
    (cache / "away").rename(cache / SPACE)
    store.refresh()
    assert fetch(store, 1) == (GetOutcome.HIT, True)
    assert keep(store, 2) is PutOutcome.STORED
    sound(cache)


@pytest.mark.parametrize("plant", LINKS + ODD + FOLDERS)
@pytest.mark.parametrize("name", ["ledger", "kvferry.json"])
def test_planted_ledger_or_marker_is_refused(cache, outside, plant: Plant, name: str):
    plant(cache / name, outside)
    with pytest.raises(ConfigError, match="expected a plain file"):
        open_store(cache)


@pytest.mark.parametrize("plant", LINKS + ODD + FOLDERS)
def test_a_ledger_that_is_replaced_while_it_serves_drops_stores(cache, outside, plant: Plant):
    store = open_store(cache, capacity=CAPACITY, lock_seconds=0.1)
    keep(store, 1)
    (cache / "ledger").unlink()
    plant(cache / "ledger", outside)
    assert keep(store, 2) is PutOutcome.IO_ERROR
    assert fetch(store, 1) == (GetOutcome.HIT, True)
    store.usage()
    assert store.stats.dropped == {PutOutcome.IO_ERROR: 1}
    if plant is not a_full_folder:
        (cache / "ledger").rmdir() if plant is a_folder else (cache / "ledger").unlink()
        assert keep(store, 2) is PutOutcome.STORED
        sound(cache)


@pytest.mark.parametrize("plant", LINKS + ODD + [an_empty_file])
def test_a_quarantine_that_is_no_folder_is_not_filled(cache, outside, plant: Plant):
    store = open_store(cache, capacity=CAPACITY)
    keep(store, 1)
    (cache / "quarantine").rmdir()
    plant(cache / "quarantine", outside)
    data = bytearray(file_of(cache, 1).read_bytes())
    data[5000] ^= 1
    file_of(cache, 1).write_bytes(data)
    assert fetch(store, 1)[0] is GetOutcome.CORRUPT
    assert not file_of(cache, 1).exists()
    assert keep(store, 1) is PutOutcome.STORED
    assert fetch(store, 1) == (GetOutcome.HIT, True)
    (cache / "quarantine").unlink()
    sound(cache)


@pytest.mark.parametrize("plant", LINKS + ODD + FOLDERS)
def test_planted_leftover_is_swept_unless_it_is_a_folder_or_link(cache, outside, plant: Plant):
    store = open_store(cache, capacity=CAPACITY)
    keep(store, 1)
    keep(store, 2)
    for number, folder in enumerate((cache, cache / SPACE, file_of(cache, 1).parent)):
        plant(folder / f".aa.{'9' * 19}.{number:032x}.{number:016x}.tmp", outside)
    store = open_store(cache, clock=lambda: 4e9)
    assert len(temporaries(cache)) == (0 if plant in ODD else 3)
    assert keep(store, 3) is PutOutcome.STORED
    assert fetch(store, 1) == (GetOutcome.HIT, True)
    sound(cache)


def test_a_leftover_that_says_too_much_lets_go_of_it_when_it_is_swept(cache):
    store = open_store(cache, capacity=CAPACITY)
    keep(store, 1)
    for number in range(3):
        (cache / f".aa.{'9' * 19}.ab.{number:016x}.tmp").touch()
    assert keep(store, 2) is PutOutcome.STORED
    open_store(cache)
    for left in temporaries(cache):
        os.utime(left, (0, 0))
    sound(cache)


def test_a_huge_file_goes_first_and_leaves_the_capacity_kept(cache):
    store = open_store(cache, capacity=CAPACITY)
    for number in range(CAPACITY // FILE_BYTES - 1):
        assert keep(store, number) is PutOutcome.STORED
    file_of(cache, 50).parent.mkdir(exist_ok=True)
    a_sparse_file(file_of(cache, 50), cache)
    for number in range(100, 103):
        assert keep(store, number) is PutOutcome.STORED
    assert not file_of(cache, 50).exists()
    assert store.stats.evicted <= 4
    sound(cache)


@pytest.mark.parametrize("when", [-1e9, 0, 1e10])
def test_a_time_that_no_clock_had_keeps_nobody_from_storing(cache, when):
    store = open_store(cache, capacity=CAPACITY)
    for number in range(CAPACITY // FILE_BYTES - 1):
        keep(store, number)
    try:
        os.utime(file_of(cache, 1), (when, when))
    except OSError:
        pytest.skip("a file system without such times")
    for number in range(100, 104):
        assert keep(store, number) is PutOutcome.STORED
    assert not file_of(cache, 1).exists(), "what has no time is thought to be old"
    sound(cache)


NAMES = [b"odd\xff\xfe", b"odd\n.kv", b"odd\xd9\xa0", b"odd" * 80, b"odd \x1b[31m", b"odd%s{}"]


@pytest.mark.parametrize("name", NAMES)
def test_names_of_odd_bytes_are_left_alone(cache, name: bytes):
    store = open_store(cache, capacity=CAPACITY)
    keep(store, 1)
    folders = [cache, cache / SPACE, file_of(cache, 1).parent, cache / "quarantine"]
    for folder in folders:
        Path(os.fsdecode(bytes(folder) + b"/" + name)).write_bytes(b"kept")
    store = open_store(cache)
    assert fetch(store, 1) == (GetOutcome.HIT, True)
    store.usage()
    sound(cache)
    DirectoryAdmin(cache).clear()
    assert sum(one.read_bytes() == b"kept" for one in cache.rglob("odd*")) == len(folders)


@pytest.mark.parametrize("plant", LINKS + ODD + FOLDERS + FILES)
def test_a_note_of_another_namespace_is_read_without_waiting(cache, outside, plant: Plant):
    store = open_store(cache, capacity=CAPACITY)
    for number, digest in enumerate(("ab" * 32, "cd" * 32, "no hex".ljust(64, "x"))):
        (cache / digest).mkdir()
        (plant if number else an_empty_file)(cache / digest / "namespace.json", outside)
    assert store.usage().same_name_namespace == ""
    if plant in LINKS:
        plant(cache / ("ef" * 32), outside)
        assert store.usage().same_name_namespace == ""


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a":' * 100_000, "9" * 100_000, '"\\ud800"', "NaN"])
def test_a_note_that_cannot_be_read_is_no_error(cache, text: str):
    (cache / ("ab" * 32)).mkdir()
    (cache / ("ab" * 32) / "namespace.json").write_text(text)
    store = open_store(cache, capacity=CAPACITY)
    assert store.usage().same_name_namespace == ""
    assert [one.name for one in namespace_usage(DirectoryAdmin(cache))] == ["tests/small", ""]
    (cache / "kvferry.json").write_text(text)
    with pytest.raises(ConfigError, match="was not written by kvferry"):
        open_store(cache)


@pytest.mark.parametrize("plant", LINKS + ODD + FOLDERS + FILES)
def test_an_operator_sees_to_a_directory_with_anything_in_it(cache, outside, plant: Plant):
    store = open_store(cache, capacity=CAPACITY)
    keep(store, 1)
    places = [
        file_of(cache, 1).with_name(f"{'94' * 20}.kv"),
        cache / SPACE / "zz",
        cache / SPACE / "00",
        cache / ("ab" * 32),
        cache / "quarantine" / f"{SPACE}-{'94' * 20}-{'0' * 16}.bad",
    ]
    for place in places:
        plant(place, outside)
    operator = DirectoryAdmin(cache)
    namespace_usage(operator)
    cache_totals(operator)
    verify_all(operator, quarantine=True)
    operator.collect()
    assert fetch(open_store(cache), 1) == (GetOutcome.HIT, True)
    operator.collect(0)
    operator.clear()
    with suppress(ConfigError):
        open_store(cache, capacity=CAPACITY)
