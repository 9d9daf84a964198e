"""The file with the keys of a storage tier."""

from __future__ import annotations

import os
from base64 import b64encode
from pathlib import Path

import pytest

from kvferry.common.errors import ConfigError
from kvferry.tiers.format.encryption import EncryptionKey
from kvferry.tiers.key_file import read_key_file

SECRETS = [bytes([number]) * 32 for number in range(4)]
BASE64 = [b64encode(one).decode() for one in SECRETS]
LINE = "a line is an id, a space, and 32 random bytes in Base64"


@pytest.fixture
def file(tmp_path) -> Path:
    path = tmp_path / "keys"
    path.write_text(f"2026-11 {BASE64[1]}\nold {BASE64[0]}\n")
    path.chmod(0o600)
    return path


def refused(file: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        read_key_file(str(file))
    assert not any(one in str(caught.value) for one in BASE64), "no message has a secret"
    return str(caught.value)


def test_the_first_line_encrypts_and_each_is_found_by_its_id(file):
    keys = read_key_file(str(file))
    assert keys.newest == EncryptionKey("2026-11", SECRETS[1])
    assert keys.find("old") == EncryptionKey("old", SECRETS[0])
    assert not any(repr(one) in repr(keys) for one in SECRETS)


def test_empty_lines_and_spaces_around_are_ignored(file):
    file.write_text(f"\n  a  {BASE64[1]} \r\n\nb\t{BASE64[2]}")
    assert [one.id for one in read_key_file(str(file)).keys] == ["a", "b"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", f"is empty; write a key into it: {LINE}"),
        ("\n \n", f"is empty; write a key into it: {LINE}"),
        (f"{BASE64[1]}\n", f"line 1 is not valid; {LINE}; an id has 1 to 31 printable ASCII characters"),
        (f"a {BASE64[1]}\nb {BASE64[2]} c\n", "line 2 is not valid"),
        (f"{BASE64[1]} a\n", "line 1 is not valid"),
        (f"\u00e9 {BASE64[1]}\n", "line 1 is not valid"),
        (f"{'i' * 32} {BASE64[1]}\n", "line 1 is not valid"),
        ("a ?????\n", f"the key in line 1 is not Base64; {LINE}"),
        (f"a {BASE64[1]}\nb {BASE64[2][:-3]}\n", "the key in line 2 is not Base64"),
        (
            f"a {b64encode(bytes(16)).decode()}\n",
            "the key in line 1 has 16 bytes, expected 32; make one with: openssl rand -base64 32",
        ),
        (f"a {b64encode(bytes(33)).decode()}\n", "the key in line 1 has 33 bytes, expected 32"),
        (f"a {BASE64[1]}\na {BASE64[2]}\n", "has two keys with the id 'a'; give each key an id of its own"),
        (f"a {BASE64[1]}\n" * 2000, "has more than 65536 bytes; name the file with the tier's keys"),
    ],
)
def test_a_file_without_valid_keys_is_refused(file, text, said):
    file.write_text(text)
    assert said in refused(file)


@pytest.mark.parametrize("mode", [0o604, 0o644, 0o602, 0o601])
def test_a_file_that_others_can_use_is_refused(file, mode):
    file.chmod(mode)
    assert refused(file) == (
        f"key_file {file} can be used by others than its owner (mode {mode:o}), who could decrypt what the "
        f"tier stores; chmod 600 {file} (a Kubernetes Secret: defaultMode 0400), and if others may have read "
        "it, make a new key"
    )


def test_a_secret_of_kubernetes_is_used(file, tmp_path):
    file.chmod(0o440)
    (tmp_path / "link").symlink_to(file)
    assert read_key_file(str(tmp_path / "link")).newest.id == "2026-11"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_another_users_file_is_refused(file):
    os.chown(file, 12345, -1)
    assert "belongs to user 12345, expected 0; chown it to 0, or name another file" in refused(file)


def test_what_is_no_file_is_refused(file, tmp_path):
    assert f"key_file {tmp_path} is no regular file; name the file with the tier's keys" in refused(tmp_path)
    os.mkfifo(tmp_path / "pipe", 0o600)
    assert "is no regular file" in refused(tmp_path / "pipe")
    assert (
        f"key_file {file}x: No such file or directory; name a readable file with the tier's keys; {LINE}"
        == refused(Path(f"{file}x"))
    )
    assert "no file has such a name" in refused(Path("a\0b"))
