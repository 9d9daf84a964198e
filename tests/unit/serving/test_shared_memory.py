"""The check of /dev/shm before engines start."""

import os
from types import SimpleNamespace

import pytest

from kvferry.common.errors import ConfigError
from kvferry.tools.serving.machine import check_shared_memory


def with_free(mebibytes: int, flag: int = 0):
    def stat(path: str) -> SimpleNamespace:
        assert path == "/dev/shm"
        return SimpleNamespace(
            f_frsize=1 << 20, f_blocks=64, f_bfree=mebibytes, f_bavail=mebibytes, f_flag=flag
        )

    return stat


def test_the_64_mib_of_a_container_are_enough_for_engines_with_one_worker():
    check_shared_memory([1, 1, 1], with_free(64))


def test_too_little_shared_memory_is_an_error_with_sizes_and_advice():
    with pytest.raises(ConfigError) as caught:
        check_shared_memory([1, 2], with_free(60))
    assert str(caught.value).startswith(
        "/dev/shm has 60 MiB free of 64 MiB, 2 engines with 3 workers need 130 MiB; remove unused files "
        "there, or enlarge it (docker: --shm-size=1g, "
    )


def test_a_read_only_or_missing_file_system_is_refused():
    with pytest.raises(ConfigError, match="/dev/shm is mounted read-only; mount a tmpfs"):
        check_shared_memory([1], with_free(64, os.ST_RDONLY))

    def missing(path: str) -> os.statvfs_result:
        raise FileNotFoundError(2, "No such file or directory", path)

    with pytest.raises(ConfigError, match="/dev/shm cannot be used: No such file or directory; mount"):
        check_shared_memory([1], missing)
