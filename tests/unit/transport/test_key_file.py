"""The file with the engines' secret, over real files."""

import os
import stat
import subprocess
import sys
import tracemalloc
from pathlib import Path

import pytest

from kvferry.common.errors import ConfigError
from kvferry.transport import security as key_file
from kvferry.transport.security import existing_keys, key_location, new_secret, read_keys, write_secret

SECRET = b"0123456789abcdef"
root_only = pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")


@pytest.fixture
def state(tmp_path, monkeypatch) -> Path:
    """The user's state directory, empty."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "state"


@pytest.fixture
def secret_file(tmp_path) -> Path:
    path = tmp_path / "secret"
    path.write_bytes(SECRET)
    path.chmod(0o600)
    return path


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_the_machines_key_is_made_on_first_use_for_its_owner_alone(state):
    assert existing_keys(None) is None
    assert not state.exists()
    old = os.umask(0)
    try:
        keys = read_keys(None)
    finally:
        os.umask(old)
    folder = state / "kvferry"
    assert [path.name for path in folder.iterdir()] == ["key"], "nothing else is left"
    assert (mode(folder), mode(folder / "key")) == (0o700, 0o600)
    assert read_keys(None) == existing_keys(None) == keys


def test_another_machine_makes_another_key(state, tmp_path, monkeypatch):
    one = read_keys(None)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "elsewhere"))
    assert read_keys(None) != one


_START = """
import sys, time
from kvferry.transport.security import read_keys
print("ready", flush=True)
sys.stdin.readline()
print(read_keys(None).fingerprint)
"""


def test_engines_that_start_at_once_use_the_same_key(state):
    engines = [
        subprocess.Popen([sys.executable, "-c", _START], stdin=-1, stdout=-1, text=True) for _ in range(6)
    ]
    for engine in engines:
        assert engine.stdout.readline() == "ready\n"
    for engine in engines:
        engine.stdin.write("go\n")
        engine.stdin.flush()
    found = {engine.communicate(timeout=30)[0].strip() for engine in engines}
    assert found == {read_keys(None).fingerprint}


def test_an_engine_that_finds_a_key_just_made_uses_that_one(state, monkeypatch):
    """Between its look and its own key, another engine made one."""
    keys = read_keys(None)
    monkeypatch.setattr(key_file, "_exists", lambda directory: False)
    assert read_keys(None) == keys
    assert [path.name for path in (state / "kvferry").iterdir()] == ["key"]


def test_a_key_appears_whole_or_not_at_all(state, monkeypatch):
    def broken() -> str:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(key_file, "new_secret", broken)
    with pytest.raises(ConfigError, match=r"No space left on device; set secret_file .*kvferry keygen"):
        read_keys(None)
    assert not (state / "kvferry" / "key").exists()


def test_a_symbolic_link_is_no_key(state, secret_file):
    (state / "kvferry").mkdir(parents=True, mode=0o700)
    (state / "kvferry" / "key").symlink_to(secret_file)
    for look in (read_keys, existing_keys):
        with pytest.raises(ConfigError, match=r"kvferry/key: it is a symbolic link; remove it, or set"):
            look(None)
    (state / "kvferry" / "key").unlink()
    (state / "kvferry" / "key").symlink_to(state / "nowhere")
    for look in (read_keys, existing_keys):
        with pytest.raises(ConfigError, match="it is a symbolic link"):
            look(None)
    assert not (state / "nowhere").exists()


def test_a_directory_that_is_a_symbolic_link_holds_no_key(state, tmp_path):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir(mode=0o700)
    state.mkdir()
    (state / "kvferry").symlink_to(elsewhere)
    with pytest.raises(ConfigError, match=r"it is a symbolic link; set secret_file"):
        read_keys(None)
    assert list(elsewhere.iterdir()) == []


@pytest.mark.parametrize("bits", [0o640, 0o604, 0o620])
def test_a_key_that_others_can_use_is_refused_with_what_to_do(state, bits):
    read_keys(None)
    (state / "kvferry" / "key").chmod(bits)
    with pytest.raises(ConfigError, match=rf"others than its owner \(mode {bits:o}\).*chmod 600 {state}"):
        read_keys(None)


def test_a_directory_that_others_can_enter_is_refused_with_what_to_do(state):
    read_keys(None)
    (state / "kvferry").chmod(0o750)
    with pytest.raises(ConfigError, match=rf"others may use it \(mode 750\); chmod 700 {state}/kvferry"):
        read_keys(None)


@root_only
def test_a_key_or_a_directory_of_somebody_else_is_refused(state):
    read_keys(None)
    os.chown(state / "kvferry" / "key", 4141, -1)
    with pytest.raises(ConfigError, match="belongs to user 4141, expected 0"):
        read_keys(None)
    os.chown(state / "kvferry" / "key", 0, -1)
    os.chown(state / "kvferry", 4141, -1)
    with pytest.raises(ConfigError, match=r"cannot hold the key .*: it belongs to user 4141"):
        read_keys(None)


def test_something_that_is_no_file_is_no_key(state):
    (state / "kvferry").mkdir(parents=True, mode=0o700)
    os.mkfifo(state / "kvferry" / "key", 0o600)
    with pytest.raises(ConfigError, match="is no regular file"):
        read_keys(None)


def test_a_home_that_cannot_be_written_is_refused_with_the_way_out(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file" / "state"))
    with pytest.raises(ConfigError, match=r"cannot hold the key .*: Not a directory; set secret_file to a"):
        read_keys(None)


def test_a_home_on_a_read_only_file_system_serves_the_key_that_it_has_or_is_refused_with_the_way_out(
    tmp_path, monkeypatch
):
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", tmp_path], check=False).returncode:
        pytest.skip("may not mount a small disk")
    try:
        monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "old"))
        made = read_keys(None)
        subprocess.run(["mount", "-o", "remount,ro", tmp_path], check=True)
        assert read_keys(None) == made
        monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "new"))
        with pytest.raises(ConfigError, match=r"cannot hold the key .*: Read-only file system; set secret_f"):
            read_keys(None)
    finally:
        subprocess.run(["umount", tmp_path], check=True)


def test_a_file_in_place_of_the_keys_directory_is_refused_with_the_way_out(state):
    state.mkdir()
    (state / "kvferry").touch(0o600)
    for look in (read_keys, existing_keys):
        with pytest.raises(ConfigError, match=r"cannot hold the key .*: Not a directory; set secret_file to"):
            look(None)


def test_a_key_is_on_disk_before_it_has_its_name_and_its_name_before_it_is_used(state, monkeypatch):
    done = []
    sync, link = os.fsync, os.link

    def synced(descriptor: int) -> None:
        found = os.fstat(descriptor)
        done.append("directory" if stat.S_ISDIR(found.st_mode) else found.st_size)
        sync(descriptor)

    monkeypatch.setattr(key_file.os, "fsync", synced)
    monkeypatch.setattr(key_file.os, "link", lambda *names, **of: done.append("name") or link(*names, **of))
    read_keys(None)
    assert done == [len(new_secret()), "name", "directory"]


def test_a_user_without_a_home_is_refused_with_the_way_out(monkeypatch):
    monkeypatch.setattr(key_file.os, "geteuid", lambda: 1_000_660_000)
    with pytest.raises(ConfigError, match=r"HOME and XDG_STATE_HOME are not set, and user 1000660000 has no"):
        key_location(None, {"XDG_STATE_HOME": "relative", "HOME": ""})


def test_the_place_of_the_key_follows_the_environment():
    named = key_location(None, {"XDG_STATE_HOME": "/s", "HOME": "/h"}), key_location(None, {"HOME": "/h"})
    assert [str(one.path) for one in named] == ["/s/kvferry/key", "/h/.local/state/kvferry/key"]
    assert not named[0].configured
    assert key_location("/x", {}).configured


def test_white_space_around_a_secret_does_not_count(secret_file):
    before = read_keys(str(secret_file))
    secret_file.write_bytes(b"\n " + SECRET + b"\r\n")
    assert read_keys(str(secret_file)) == before


def test_a_secret_that_is_too_short_is_refused_with_both_lengths(secret_file):
    secret_file.write_bytes(SECRET[:-1] + b"\n\n\n")
    with pytest.raises(ConfigError, match=r"secret holds 15 bytes, a secret has 16 to 65536"):
        read_keys(str(secret_file))


def test_a_file_that_is_far_too_long_is_no_secret_and_is_not_read_whole(secret_file):
    secret_file.write_bytes(bytes(1 << 20))
    tracemalloc.start()
    try:
        with pytest.raises(ConfigError, match="holds more than 65536 bytes"):
            read_keys(str(secret_file))
        assert tracemalloc.get_traced_memory()[1] < 1 << 19
    finally:
        tracemalloc.stop()


def test_a_secret_file_that_is_not_there_is_refused_by_name(tmp_path):
    with pytest.raises(ConfigError, match=r"secret_file .*nowhere: No such file"):
        read_keys(str(tmp_path / "nowhere"))


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_a_secret_file_that_may_not_be_read_is_refused_by_name(secret_file):
    secret_file.chmod(0)
    with pytest.raises(ConfigError, match="Permission denied"):
        read_keys(str(secret_file))


@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo])
def test_a_directory_and_a_pipe_are_no_secret(tmp_path, make):
    make(tmp_path / "secret")
    with pytest.raises(ConfigError, match="is no regular file"):
        read_keys(str(tmp_path / "secret"))


def test_reading_keys_leaves_no_file_open(state, secret_file, tmp_path):
    read_keys(None)
    read_keys(str(secret_file))
    secret_file.chmod(0o644)
    (state / "kvferry").chmod(0o755)
    for named in (None, str(secret_file)):
        with pytest.raises(ConfigError, match="mode"):
            read_keys(named)
    left = [os.path.realpath(one) for one in Path("/proc/self/fd").iterdir()]
    assert not [one for one in left if one.startswith(str(tmp_path))]


def test_a_secret_file_may_be_as_kubernetes_mounts_it_and_not_open_to_everybody(secret_file, tmp_path):
    """A symbolic link to a file of root's that the group of the pod may read."""
    link = tmp_path / "link"
    link.symlink_to(secret_file)
    secret_file.chmod(0o440)
    assert read_keys(str(link)) == read_keys(str(secret_file))
    secret_file.chmod(0o644)
    with pytest.raises(ConfigError, match=r"mode 644.*chmod 600 .*\(a Kubernetes Secret: defaultMode 0400\)"):
        read_keys(str(link))


@root_only
def test_a_secret_file_of_somebody_else_is_refused_but_not_one_of_roots(secret_file, monkeypatch):
    monkeypatch.setattr(key_file.os, "geteuid", lambda: 4242)
    read_keys(str(secret_file))
    os.chown(secret_file, 4141, -1)
    with pytest.raises(ConfigError, match="belongs to user 4141"):
        read_keys(str(secret_file))


def test_a_written_secret_is_never_overwritten(tmp_path):
    path = tmp_path / "secret"
    write_secret(path)
    before = path.read_text()
    assert (mode(path), len(before), before != new_secret()) == (0o600, 45, True)
    with pytest.raises(ConfigError, match="exists and is not overwritten"):
        write_secret(path)
    (tmp_path / "link").symlink_to(tmp_path / "planted")
    with pytest.raises(ConfigError, match="exists and is not overwritten"):
        write_secret(tmp_path / "link")
    assert path.read_text() == before
    with pytest.raises(ConfigError, match="No such file or directory; give a file in a directory of yours"):
        write_secret(tmp_path / "no" / "secret")
