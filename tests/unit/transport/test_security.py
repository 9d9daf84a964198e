"""Who may speak on the control channel."""

import os

import pytest

from kvferry.errors import ConfigError
from kvferry.transport import security

SECRET = b"0123456789abcdef"


@pytest.fixture
def secret_file(tmp_path):
    path = tmp_path / "secret"
    path.write_bytes(SECRET)
    return path


def test_without_a_secret_file_there_are_no_keys():
    assert security.read_keys(None) is None


def test_the_same_secret_gives_the_same_keys_and_another_gives_others(secret_file, tmp_path):
    other = tmp_path / "other"
    other.write_bytes(SECRET[::-1])
    keys = security.read_keys(str(secret_file))
    assert keys == security.read_keys(str(secret_file))
    assert keys.public != security.read_keys(str(other)).public
    assert SECRET not in keys.secret


def test_white_space_around_a_secret_does_not_count(secret_file):
    before = security.read_keys(str(secret_file))
    secret_file.write_bytes(b"\n " + SECRET + b"\r\n")
    assert security.read_keys(str(secret_file)) == before


def test_a_secret_that_is_too_short_is_refused_with_both_lengths(secret_file):
    secret_file.write_bytes(SECRET[:-1] + b"\n\n\n")
    with pytest.raises(ConfigError, match=r"secret holds 15 bytes, a secret has at least 16"):
        security.read_keys(str(secret_file))


def test_a_secret_file_that_is_not_there_is_refused_by_name(tmp_path):
    with pytest.raises(ConfigError, match=r"secret_file .*nowhere: No such file"):
        security.read_keys(str(tmp_path / "nowhere"))


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_a_secret_file_that_may_not_be_read_is_refused_by_name(secret_file):
    secret_file.chmod(0)
    with pytest.raises(ConfigError, match="Permission denied"):
        security.read_keys(str(secret_file))


def test_a_directory_is_no_secret(tmp_path):
    with pytest.raises(ConfigError, match="Is a directory"):
        security.read_keys(str(tmp_path))


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "::1", "localhost"])
def test_loopback_needs_no_secret(host):
    security.check_host(host, None, allow_insecure=False)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "*", "10.1.2.3", "node7", "", "localhost.example.org"])
def test_anything_else_needs_a_secret_or_leave(host, secret_file):
    with pytest.raises(ConfigError, match="set secret_file on both engines, or allow_insecure"):
        security.check_host(host, None, allow_insecure=False)
    security.check_host(host, None, allow_insecure=True)
    security.check_host(host, security.read_keys(str(secret_file)), allow_insecure=False)
