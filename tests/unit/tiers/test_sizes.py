from contextlib import suppress

import pytest
from hypothesis import given, strategies as st

from kvferry.common.errors import ConfigError
from kvferry.common.units import parse_size
from support.examples import examples


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("1.5GiB", 3 << 29),
        ("20 MB", 20_000_000),
        (1 << 20, 1 << 20),
        ("1048576", 1 << 20),
        ("0", 0),
        (" 7 b ", 7),
        ("2TIB", 2 << 40),
        ("3tb", 3 * 10**12),
        ("1PiB", 1 << 50),
        ("0.5kib", 512),
        ("1 KB", 1000),
        ("9007199254740993", 9007199254740993),
        ("0.1 TiB", (1 << 40) // 10),
        ("9" * 400, 10**400 - 1),
    ],
)
def test_a_size_is_exact(text, size):
    assert parse_size(text) == size


@pytest.mark.parametrize(
    "text", ["", "GiB", "-1", "1e3", "1,5 GiB", "5 EiB", "4GiB 2", ".5GiB", "1.GiB", "nan"]
)
def test_invalid_size_is_refused(text):
    with pytest.raises(ConfigError) as caught:
        parse_size(text)
    assert str(caught.value) == (
        f"{text!r} is not a size; write a number of bytes, or one with KiB, MiB, GiB, TiB or PiB"
    )


@pytest.mark.parametrize("size", [8, "8", "64", "0.5", (1 << 20) - 1])
def test_small_numbers_without_a_unit_are_refused(size):
    with pytest.raises(ConfigError, match=rf"the size {size} has no unit, .* write {size}GiB or {size}B"):
        parse_size(size)


@examples(60)
@given(st.text())
def test_any_text_is_a_size_or_refused(text):
    with suppress(ConfigError):
        assert parse_size(text) >= 0
