import json
import subprocess
from pathlib import Path

import pytest

from kvferry.connector.config import read_tiers
from kvferry.tiers.files.tier import FileSettings
from kvferry.tiers.host.settings import HostSettings
from kvferry.tiers.objects.settings import ObjectSettings
from kvferry.tools.doctor import storage
from kvferry.tools.doctor.finding import ProcessResult, State
from kvferry.tools.doctor.machine import Mount
from support.encrypted import write_keys

MARK = "kvferry doctor: "
GIB = 1 << 30
ROOM = {"owner": 0, "mode": 0o700, "free": 100 * GIB, "ledger": None}
DISK = Mount("/", "ext4", "/dev/sda1")


def told(*lines: dict, code: int | None = 0) -> ProcessResult:
    return ProcessResult(code, "\n".join(f"{MARK}{json.dumps(line)}" for line in lines), "")


def looked(settings=None, *, on: Mount = DISK, code: int | None = 0, end=None, **room):
    lines = [{"real": "/kv"}, {**ROOM, **room}, {"direct": True} if end is None else end]
    return list(
        storage.file(
            "file", settings or FileSettings("/kv"), lambda path: told(*lines, code=code), lambda: [on]
        )
    )


def worst(found) -> State:
    return max((one.state for one in found), key=list(State).index)


@pytest.mark.parametrize(
    ("capacity", "room", "state"),
    [
        (None, 10 * GIB, State.OK),
        ("8GiB", 10 * GIB, State.OK),
        ("12GiB", 10 * GIB, State.BAD),
    ],
)
def test_host_memory_must_be_there(capacity, room, state):
    assert storage.host(HostSettings(capacity), lambda: (room, "left to this control group")).state is state


def test_memory_that_cannot_be_seen_is_said():
    assert storage.host(HostSettings("1GiB"), lambda: None).state is State.NOTE


def test_a_directory_on_a_disk_is_well():
    assert worst(looked()) is State.OK


@pytest.mark.parametrize(
    ("settings", "room", "state", "said"),
    [
        (FileSettings("/kv", "50GiB"), {}, State.OK, "50 GiB, as configured; 100 GiB free"),
        (
            FileSettings("/kv", "500GiB"),
            {},
            State.BAD,
            "a capacity of 500 GiB, as configured, and 100 GiB free",
        ),
        (FileSettings("/kv", "150GiB"), {"ledger": [GIB, 60 * GIB]}, State.OK, "and 60 GiB of cache"),
        (FileSettings("/kv"), {}, State.OK, "10 GiB, a tenth of what is free"),
        (
            FileSettings("/kv"),
            {"ledger": [7 * GIB, GIB]},
            State.OK,
            "7 GiB, as the directory was set to before",
        ),
        (FileSettings("/kv", "1GiB"), {"free": 0}, State.BAD, "and 0 B free"),
        (
            FileSettings("/kv"),
            {"free": 5 << 20},
            State.BAD,
            "a tenth of what is free, and 5 MiB free: too",
        ),
    ],
)
def test_a_capacity_must_fit(settings, room, state, said):
    found = looked(settings, **room)
    assert worst(found) is state
    assert any(said in one.found for one in found)


@pytest.mark.parametrize(
    ("mount", "said"),
    [
        (Mount("/kv", "tmpfs", "tmpfs"), "it is memory"),
        (Mount("/kv", "nfs4", "server:/export"), "machines can share it"),
        (Mount("/kv", "fuse.s3fs", "s3fs"), "machines can share it"),
        (Mount("/", "overlay", "overlay"), "it is lost with the container"),
    ],
)
def test_the_finding_names_the_file_system_of_a_directory(mount, said):
    found = looked(on=mount)
    assert worst(found) is State.NOTE
    assert any(said in one.found for one in found)


def test_a_directory_without_direct_io_or_open_to_others_is_noted():
    assert "page cache" in looked(end={"direct": False})[-1].found
    assert "mode 755" in looked(mode=0o755)[-1].found


@pytest.mark.parametrize(
    ("number", "advice"),
    [(30, "for writing"), (37, "locks"), (5, "owner, mode and mount")],
)
def test_a_directory_that_cannot_be_written_is_bad(number, advice):
    found = looked(end={"failed": "because", "number": number})
    assert found[0].state is State.BAD
    assert advice in found[0].advice


def test_keys_must_fit_the_directory(tmp_path):
    file = write_keys(tmp_path / "keys", "a")
    encrypted = FileSettings("/kv", key_file=str(file))
    assert worst(looked(encrypted, encrypted=True)) is worst(looked(encrypted=False)) is State.OK
    for settings, found in ((encrypted, False), (FileSettings("/kv"), True)):
        [said] = looked(settings, encrypted=found)
        assert said.state is State.BAD
        assert "encrypted, and the tier has" in said.found
        assert "another directory" in said.advice
    file.chmod(0o644)
    [said] = looked(encrypted)
    assert "can be used by others than its owner" in said.found


def test_a_mount_that_hangs_is_named():
    hangs = Mount("/kv", "nfs4", "gone:/export")
    found = list(
        storage.file("file", FileSettings("/kv/a"), lambda path: told(code=None), lambda: [DISK, hangs])
    )
    assert [one.state for one in found] == [State.BAD]
    assert "(nfs4 of gone:/export, mounted on /kv) does not answer" in found[0].found


def test_a_real_directory_is_looked_at_and_left_as_it_was(tmp_path):
    tmp_path.chmod(0o700)
    assert worst(storage.file("file", FileSettings(str(tmp_path), "1MiB"))) is not State.BAD
    assert list(tmp_path.iterdir()) == []
    (missing,) = storage.file("file", FileSettings(str(tmp_path / "none")))
    assert (missing.state, "does not exist" in missing.found) == (State.BAD, True)
    (tmp_path / "kvferry.json").write_text("{}")
    (other,) = storage.file("file", FileSettings(str(tmp_path)))
    assert "was not written by kvferry" in other.found


def test_the_default_directory_may_be_missing(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    tmp_path.chmod(0o755)
    found = list(storage.file("file", FileSettings()))
    assert worst(found) is not State.BAD
    assert not any("mode" in one.found for one in found), "it will be made for its user alone"


@pytest.fixture
def small(tmp_path):
    """Mounts a tmpfs with some options."""
    where = tmp_path / "small"
    where.mkdir()

    def mount(options: str) -> Path:
        command = ["mount", "-t", "tmpfs", "-o", f"{options},mode=700", "none", where]
        if subprocess.run(command, check=False, capture_output=True).returncode:
            pytest.skip("nothing can be mounted here")
        return where

    yield mount
    subprocess.run(["umount", where], check=False, capture_output=True)


def test_a_full_disk_is_bad(small):
    full = small("size=4k")
    (full / "filler").write_bytes(bytes(4096))
    found = list(storage.file("file", FileSettings(str(full), "1MiB")))
    assert [one.advice for one in found if one.state is State.BAD] == [
        "free space or lower the capacity",
        "lower the capacity or free space",
    ]
    assert any("tmpfs" in one.found for one in found)


def test_a_disk_without_a_free_inode_is_bad_and_no_full_disk(small):
    full = small("size=16m,nr_inodes=3")
    for name in "ab":
        (full / name).touch()
    found = list(storage.file("file", FileSettings(str(full), "1MiB")))
    (bad,) = [one for one in found if one.state is State.BAD]
    assert "No space left on device: no inode is free, but 16 MiB are" in bad.found
    assert bad.advice == "remove files there, or use a file system with more inodes"


def test_object_storage_is_written_to_and_left_as_it_was(tmp_path):
    (found,) = storage.try_storage("object", ObjectSettings(f"file://{tmp_path}"))
    assert found.state is State.OK
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (ObjectSettings("s3://b/p", {"endpont": "x"}), "has no option 'endpont'"),
        (
            ObjectSettings(
                "s3://b/p",
                {
                    "endpoint": "http://127.0.0.1:9",
                    "allow_http": "true",
                    "access_key_id": "k",
                    "secret_access_key": "s",
                },
                2.0,
            ),
            "s3://b/p: it cannot be reached",
        ),
    ],
)
def test_object_storage_that_cannot_be_used_is_bad(settings, said):
    (found,) = storage.try_storage("object", settings)
    assert found.state is State.BAD
    assert said in found.found


def test_all_tiers_are_looked_at(tmp_path):
    tiers = read_tiers(
        [
            {"type": "host", "capacity": "1MiB"},
            {"type": "file", "path": str(tmp_path)},
            {"type": "object", "url": f"file://{tmp_path}"},
        ]
    )
    assert {one.subject for one in storage.check(tiers)} == {"host memory", "tier 1, file", "tier 2, object"}


def test_directories_that_are_one_are_found_whatever_their_names(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    (tmp_path / "c").symlink_to("a")
    paths = [str(tmp_path / name) for name in ("a", "b", "c")]
    tiers = read_tiers([{"type": "file", "path": path} for path in paths])
    (found,) = storage.duplicate_directories(tiers)
    assert (found.subject, found.state) == ("tier 3, file", State.BAD)
    assert found.found.startswith(f"{paths[2]} and {paths[0]}, which is a tier already, are one directory")
    assert found in storage.check(tiers)


@pytest.mark.parametrize("paths", [["a"], ["a", "b"], ["a", "none"]])
def test_directories_that_are_not_one_are_well(tmp_path, paths):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    tiers = read_tiers([{"type": "file", "path": str(tmp_path / path)} for path in paths])
    assert list(storage.duplicate_directories(tiers)) == []
