import errno
import os

import pytest

from kvferry.tiers.files import opening as directory_checks
from kvferry.tools.doctor import probes


def told(capsys) -> dict:
    return {
        name: value for line in probes.parse_output(capsys.readouterr().out) for name, value in line.items()
    }


def test_a_directory_is_described_and_left_as_it_was(tmp_path, capsys):
    tmp_path.chmod(0o750)
    probes.path(str(tmp_path))
    found = told(capsys)
    assert (found["real"], found["mode"], found["owner"]) == (str(tmp_path.resolve()), 0o750, os.getuid())
    assert found["free"] > 0
    assert "direct" in found
    assert list(tmp_path.iterdir()) == []


def test_a_file_system_without_locks_is_told(tmp_path, capsys, monkeypatch):
    def refuse(fd, how):
        raise OSError(errno.ENOLCK, "no locks")

    monkeypatch.setattr(directory_checks.fcntl, "flock", refuse)
    probes.path(str(tmp_path))
    assert told(capsys)["number"] == errno.ENOLCK
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("number", "key"), [(errno.EINVAL, "direct"), (errno.EIO, "failed")])
def test_only_what_direct_io_refuses_is_written_otherwise(tmp_path, capsys, monkeypatch, number, key):
    write, tried = os.pwrite, []

    def once(fd, data, at):
        tried.append(at)
        if len(tried) == 1:
            raise OSError(number, "refused")
        return write(fd, data, at)

    monkeypatch.setattr(directory_checks.os, "pwrite", once)
    monkeypatch.setattr(directory_checks, "set_direct", lambda fd, on: on)
    probes.path(str(tmp_path))
    assert told(capsys).get(key) in (False, os.strerror(errno.EIO))
