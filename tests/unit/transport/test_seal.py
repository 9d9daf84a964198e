"""A sealed grant opens for the one use that it was made for, and for no other."""

from __future__ import annotations

import base64
import random
import zlib
from dataclasses import replace

import msgspec
import pytest
from hypothesis import given, strategies as st
from msgspec import structs

from kvferry.common.errors import ProtocolError
from kvferry.transport import seal as module
from kvferry.transport.lease import LeaseWord
from kvferry.transport.redeem import Grant, PromptContent
from kvferry.transport.seal import MAX_SEAL, SealBinding, _cipher, open_seal, seal_grant
from support.examples import examples
from transport.cards import ticket

RUN, TOKENS, KEY = 5, 40, b"k" * 32
CONTENT = PromptContent("tokens", "items", "adapter", "salt")
USE = SealBinding(("10.0.0.1", 5600), ticket("a"), TOKENS, CONTENT)
WORD = LeaseWord(1, 2, RUN)
GRANT = Grant.of(LeaseWord(3, 7, RUN), TOKENS, [[4, 5, 6], [9]])
NO_USE = "a sealed grant does not open: it was changed on its way, or sealed by another run of the engine"


@pytest.fixture(scope="module")
def sealed() -> str:
    return seal_grant(KEY, GRANT, USE)


def refusal(text: str, use: SealBinding = USE, key: bytes = KEY) -> str:
    with pytest.raises(ProtocolError) as error:
        open_seal(key, text, use)
    return str(error.value)


def test_a_seal_opens_as_the_answer_to_its_ticket(sealed):
    assert open_seal(KEY, sealed, USE) == GRANT


def test_a_seal_shows_nothing_and_is_never_the_same_twice(sealed):
    again = seal_grant(KEY, GRANT, USE)
    assert len(again) == len(sealed)
    assert again != sealed
    data = base64.urlsafe_b64decode(sealed)
    assert not any(part in data for part in (b"tokens", b"salt", GRANT.tables[0], ticket("a")))


@given(st.lists(st.lists(st.integers(0, (1 << 32) - 1), max_size=40), max_size=9), st.booleans())
@examples(60)
def test_any_block_tables_come_back_as_they_were(tables, runs):
    if runs:
        tables = [list(range(first, first + 300)) for first in range(len(tables))]
    grant = Grant.of(WORD, TOKENS, tables)
    assert open_seal(KEY, seal_grant(KEY, grant, USE), USE) == grant


def test_a_seal_with_any_bit_changed_does_not_open(sealed):
    data = base64.urlsafe_b64decode(sealed)
    for bit in range(8 * len(data)):
        changed = bytearray(data)
        changed[bit // 8] ^= 1 << bit % 8
        assert refusal(base64.urlsafe_b64encode(changed).decode()).startswith(NO_USE)


def test_a_seal_that_is_cut_or_longer_does_not_open(sealed):
    for length in range(len(sealed)):
        assert refusal(sealed[:length]).startswith(NO_USE)
    for more in ("AAAA", "\x00", "é", "\ud800"):
        assert refusal(sealed + more).startswith(NO_USE)


@pytest.mark.parametrize(
    "use",
    [
        replace(USE, ticket=ticket("b")),
        replace(USE, address=("10.0.0.2", 5600)),
        replace(USE, address=("10.0.0.1", 5601)),
        replace(USE, tokens=TOKENS - 1),
        *(
            replace(USE, content=structs.replace(CONTENT, **{field: "other"}))
            for field in ("tokens", "items", "adapter", "salt")
        ),
        replace(USE, content=PromptContent("tokens", "items", "adapter")),
        # The same characters, cut at another place.
        replace(USE, content=PromptContent("tokens", "item", "sadapter", "salt")),
    ],
)
def test_a_seal_opens_for_no_other_ticket_address_or_prompt(sealed, use):
    assert refusal(sealed, use).startswith(NO_USE)


def test_a_seal_opens_with_no_other_key_and_under_no_other_protocol(sealed, monkeypatch):
    assert refusal(sealed, key=bytes(32)).startswith(NO_USE)
    monkeypatch.setattr(module, "PROTOCOL", module.PROTOCOL + 1)
    assert refusal(sealed).startswith(NO_USE)


def test_a_seal_that_is_too_long_is_refused_unread():
    assert refusal("A" * (MAX_SEAL + 1)) == "a sealed grant of 4097 characters, at most 4096"
    assert refusal("A" * MAX_SEAL).startswith(NO_USE)


def test_block_tables_that_do_not_fit_are_not_sealed():
    scattered = random.Random(1).sample(range(1, 1 << 20), 8192)
    assert seal_grant(KEY, Grant.of(WORD, TOKENS, [scattered]), USE) == ""
    assert 0 < len(seal_grant(KEY, Grant.of(WORD, TOKENS, [scattered[:700]]), USE)) <= MAX_SEAL
    whole = range(1, 8193)
    assert 0 < len(seal_grant(KEY, Grant.of(WORD, TOKENS, [whole]), USE)) < 400
    assert seal_grant(KEY, Grant.of(WORD, TOKENS, [[1] * (1 << 16), [1]]), USE) == ""


def test_block_tables_that_do_not_fit_are_not_compressed_to_their_end(monkeypatch):
    class Counting:
        def __init__(self, *arguments):
            self.inner = compressobj(*arguments)
            self.flush = self.inner.flush

        def compress(self, data):
            compressed.append(len(data))
            return self.inner.compress(data)

    compressobj, compressed = zlib.compressobj, []
    monkeypatch.setattr(zlib, "compressobj", Counting)
    scattered = random.Random(1).sample(range(1, 1 << 20), 1 << 16)
    assert seal_grant(KEY, Grant.of(WORD, TOKENS, [scattered]), USE) == ""
    assert 0 < sum(compressed) < 1 << 16, "of 256 KiB"


def forged(*inner) -> str:
    """Return what an engine with the key can write."""
    data = _cipher(KEY, USE).encrypt(b"n" * 12, msgspec.msgpack.encode(inner), USE.encoded())
    return base64.urlsafe_b64encode(b"n" * 12 + data).decode()


PACKED = zlib.compress(bytes(8))


@pytest.mark.parametrize(
    ("inner", "says"),
    [
        ((RUN, 3, 7), "Expected `array` of at least length 5"),
        ((RUN, -1, 7, [2], PACKED), "Expected `int` >= 0"),
        ((RUN, 3, 7, [-2], PACKED), "Expected `int` >= 0"),
        ((RUN, 3, 7, [0] * 1025, PACKED), "length <= 1024"),
        ((RUN, 3, 7, [1 << 17], PACKED), "131072 sealed blocks, at most 65536"),
        ((RUN, 3, 7, [3], PACKED), "block tables of 8 bytes or more, expected 12"),
        ((RUN, 3, 7, [1], PACKED), "block tables of 5 bytes or more, expected 4"),
        ((RUN, 3, 7, [2], zlib.compress(bytes(1 << 21))), "block tables of 9 bytes or more, expected 8"),
        ((RUN, 3, 7, [2], PACKED[:-9]), "block tables of"),
        ((RUN, 3, 7, [2], b"no stream"), "cannot be unpacked"),
    ],
)
def test_an_engine_with_the_key_cannot_seal_what_is_out_of_bounds(inner, says):
    assert open_seal(KEY, forged(RUN, 3, 7, [2], PACKED), USE) == Grant.of(
        LeaseWord(3, 7, RUN), TOKENS, [[0, 0]]
    )
    reason = refusal(forged(*inner))
    assert reason.startswith("not a sealed grant: ")
    assert says in reason


@given(
    st.text(max_size=80) | st.binary(max_size=80).map(lambda data: base64.urlsafe_b64encode(data).decode())
)
@examples(200)
def test_any_text_of_a_client_is_refused_in_one_sentence(text):
    assert "\n" not in refusal(text)
