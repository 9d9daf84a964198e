"""Keys of chunks: equal for equal content wherever they are computed, and for nothing else."""

import hashlib
import json
import os
import subprocess
import sys
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import assume, given, strategies as st

from kvferry.common.errors import Unnameable
from kvferry.keys import KEY_BYTES, ChunkKeys, Item
from support.examples import examples

QUICK = examples(100)
TEXTS = st.text(max_size=4)
IDS = st.lists(st.integers(0, 2**32 - 1), max_size=30)
ITEMS = st.lists(st.builds(Item, st.integers(0, 35), st.integers(1, 9), TEXTS), max_size=4)


def spelled(chunk_tokens, ids, items, lora, salt, end):
    """The key at `end` by the letter of the documented format, with no state and nothing remembered."""

    def number(value, width=8):
        return bytes((value >> 8 * at) & 255 for at in range(width))

    def text(value):
        data = value.encode("utf-8", "surrogatepass")
        return number(len(data)) + data

    def digest(person, message):
        return hashlib.blake2b(message, digest_size=32, person=person).digest()

    key = digest(b"kvferry-root-1", number(chunk_tokens) + text(lora) + text(salt))
    for first in range(0, end, chunk_tokens):
        last = min(first + chunk_tokens, end)
        here = sorted(
            (item for item in items if first <= item.start < last),
            key=lambda item: (item.start, item.tokens, item.identity),
        )
        message = key + number(last - first) + b"".join(number(each, 4) for each in ids[first:last])
        message += number(len(here))
        for item in here:
            message += number(item.start) + number(item.tokens) + text(item.identity)
        whole = last - first == chunk_tokens
        key = digest(b"kvferry-chunk-1" if whole else b"kvferry-tail-1", message)
    return key


IMAGES = [Item(5, 2, "image"), Item(9, 1, "later")]
GOLDEN = [
    (
        {"chunk_tokens": 4, "tokens": range(8)},
        8,
        "72987cb457b6797e70fe6d06779240a85012748decd1617c7e279360b9a308f2",
    ),
    (
        {"chunk_tokens": 4, "tokens": range(8), "items": IMAGES, "lora": "adapter", "salt": "tenant"},
        8,
        "7ae52f5432f377cef41562f23ab331bb0c2f49ddf7592239f2e6ce26cf0c960e",
    ),
    (
        {"chunk_tokens": 4, "tokens": range(8), "items": IMAGES, "lora": "adapter", "salt": "tenant"},
        7,
        "c4e31f8e96a301d5eabc0e557ee97814b773b9221a3681422f7ce87dfff55895",
    ),
    (
        {"chunk_tokens": 256, "tokens": [2**32 - 1] * 600},
        600,
        "d764d2b3bbae5bc6bdf478424c05c78b21f008aa0a8844bdb4ecdf5ff977140b",
    ),
]


@pytest.mark.parametrize(("made", "end", "key"), GOLDEN, ids=["plain", "everything", "tail", "long tail"])
def test_keys_are_fixed_for_ever(made, end, key):
    assert ChunkKeys(**made).at(end).hex() == key
    wanted = {"items": [], "lora": "", "salt": "", **made}
    assert spelled(wanted.pop("chunk_tokens"), wanted.pop("tokens"), **wanted, end=end).hex() == key


@QUICK
@given(st.integers(1, 9), IDS, ITEMS, TEXTS, TEXTS)
def test_every_key_is_what_the_format_says(chunk_tokens, ids, items, lora, salt):
    keys = ChunkKeys(chunk_tokens, ids, items=items, lora=lora, salt=salt)
    for end in range(1, len(ids) + 1):
        assert keys.at(end) == spelled(chunk_tokens, ids, items, lora, salt, end)
    whole = range(chunk_tokens, len(ids) + 1, chunk_tokens)
    assert keys.chunks() == [spelled(chunk_tokens, ids, items, lora, salt, end) for end in whole]


@pytest.mark.parametrize("seed", ["0", "12345"])
def test_chunk_keys_do_not_depend_on_the_hash_seed(seed):
    program = (
        "import sys, json; from kvferry.keys import ChunkKeys, Item;"
        "keys = ChunkKeys(4, list(range(11)), items={Item(5, 2, 'b'), Item(5, 2, 'a')}, lora='l', salt='s');"
        "print(json.dumps([keys.at(end).hex() for end in range(1, 12)]))"
    )
    output = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONHASHSEED": seed},
        capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    items = [Item(5, 2, "a"), Item(5, 2, "b")]
    assert json.loads(output) == [spelled(4, range(11), items, "l", "s", end).hex() for end in range(1, 12)]


@QUICK
@given(st.integers(1, 9), IDS, ITEMS, st.lists(st.integers(0, 30), max_size=5))
def test_chunk_keys_do_not_depend_on_how_tokens_are_split_over_calls(chunk_tokens, ids, items, cuts):
    at_once = ChunkKeys(chunk_tokens, ids, items=items)
    grown = ChunkKeys(chunk_tokens, items=items)
    edges = [0, *sorted(min(cut, len(ids)) for cut in cuts), len(ids)]
    for first, last in pairwise(edges):
        grown.extend(ids[first:last])
        assert grown.chunks() == at_once.chunks()[: last // chunk_tokens]
        assert len(grown) == last
    for end in range(1, len(ids) + 1):
        assert grown.at(end) == at_once.at(end)


@pytest.mark.parametrize(
    "held",
    [
        tuple,
        np.array,
        lambda ids: np.array(ids, ">i8"),
        lambda ids: np.array(ids, np.int32),
        lambda ids: np.array(ids, np.uint64),
        lambda ids: np.repeat(ids, 2)[::2],
        lambda ids: [np.int64(each) for each in ids],
        lambda _: range(300, 309),
    ],
)
def test_chunk_keys_do_not_depend_on_the_type_of_the_tokens(held):
    ids = list(range(300, 309))
    assert ChunkKeys(4, held(ids)).at(9) == ChunkKeys(4, ids).at(9)


def test_bytes_are_token_ids_as_well_not_memory():
    assert ChunkKeys(4, b"abcdefgh").chunks() == ChunkKeys(4, list(b"abcdefgh")).chunks()


def test_returned_lists_of_chunk_keys_are_copies():
    ids = np.arange(8)
    keys = ChunkKeys(4, ids)
    before = keys.chunks()
    ids[:] = 0
    keys.chunks().clear()
    keys.extend(range(8, 16))
    assert keys.chunks()[:2] == before
    assert keys.chunks(2) == keys.chunks()[2:]
    assert len(keys.chunks()) == 4


def different(one, other):
    """No key of one is a key of the other, at any length."""
    mine = {ChunkKeys(**one).at(end) for end in range(1, len(one["tokens"]) + 1)}
    theirs = {ChunkKeys(**other).at(end) for end in range(1, len(other["tokens"]) + 1)}
    return len(mine) == len(one["tokens"]) and len(theirs) == len(other["tokens"]) and not mine & theirs


def made(chunk_tokens=4, tokens=range(9), **rest):
    return {"chunk_tokens": chunk_tokens, "tokens": tokens, **rest}


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (made(lora="a", salt="b"), made(lora="ab")),
        (made(lora="a", salt="b"), made(salt="ab")),
        (made(lora="a"), made(salt="a")),
        (made(lora=""), made(lora="\0")),
        (made(salt="\ud83d\ude00"), made(salt="\U0001f600")),
        (made(salt="\ud800"), made(salt="?")),
        (made(4), made(3)),
        (made(4, range(4)), made(5, range(4))),
        (made(tokens=[1, 0]), made(tokens=[0, 1])),
        (made(tokens=[256]), made(tokens=[1])),
        (made(items=[Item(0, 1, "a")]), made()),
        (made(items=[Item(0, 1, "a")]), made(items=[Item(0, 1, "b")])),
        (made(items=[Item(0, 1, "a")]), made(items=[Item(0, 2, "a")])),
        (made(items=[Item(0, 1, "a"), Item(0, 1, "b")]), made(items=[Item(0, 1, "ab")])),
        (made(items=[Item(0, 1, "a"), Item(0, 1, "a")]), made(items=[Item(0, 1, "a")])),
    ],
)
def test_similar_prompts_have_different_chunk_keys(one, other):
    assert different(one, other)


@QUICK
@given(st.tuples(IDS, ITEMS, TEXTS, TEXTS), st.tuples(IDS, ITEMS, TEXTS, TEXTS))
def test_other_content_has_another_key(one, other):
    (ids, items, lora, salt), (their_ids, their_items, their_lora, their_salt) = one, other
    assume(ids and their_ids)

    def content(ids, items, *rest):
        return ids, sorted(item for item in items if item.start < len(ids)), *rest

    same = content(*one) == content(*other)
    mine = ChunkKeys(3, ids, items=items, lora=lora, salt=salt).at(len(ids))
    theirs = ChunkKeys(3, their_ids, items=their_items, lora=their_lora, salt=their_salt).at(len(their_ids))
    assert (mine == theirs) == same


def test_tokens_that_spell_an_item_are_no_item():
    """Two tokens and an item are, but for the count of tokens, the bytes of eight tokens and no item."""
    item = made(16, [7, 8], items=[Item(0, 1, "")])
    tokens = made(16, [7, 8, 1, 0, 0, 0, 1, 0])
    assert different(item, tokens)


@pytest.mark.parametrize("chunk_tokens", [2, 3, 8])
def test_a_tail_is_never_a_chunk(chunk_tokens):
    """The same tokens after the same root, as a whole chunk and as a tail of as many tokens."""
    keys = ChunkKeys(chunk_tokens, range(3 * chunk_tokens))
    found = [keys.at(end) for end in range(1, 3 * chunk_tokens + 1)]
    assert len(set(found)) == len(found)
    assert [keys.at(end * chunk_tokens) for end in (1, 2, 3)] == keys.chunks()


def test_blake2b_person_separates_a_tail_from_a_chunk_of_the_same_bytes():
    root = hashlib.blake2b(
        (4).to_bytes(8, "little") + bytes(16), digest_size=32, person=b"kvferry-root-1"
    ).digest()
    tail = root + (3).to_bytes(8, "little") + np.arange(3, dtype="<u4").tobytes() + bytes(8)
    keys = ChunkKeys(4, range(3))
    assert keys.at(3) == hashlib.blake2b(tail, digest_size=32, person=b"kvferry-tail-1").digest()
    assert keys.at(3) != hashlib.blake2b(tail, digest_size=32, person=b"kvferry-chunk-1").digest()


def test_an_item_counts_from_where_it_begins():
    plain, image = ChunkKeys(4, range(12)), ChunkKeys(4, range(12), items=[Item(5, 6, "image")])
    assert image.chunks()[0] == plain.chunks()[0]
    assert image.at(5) == plain.at(5)
    assert not {image.at(end) for end in range(6, 13)} & {plain.at(end) for end in range(6, 13)}


def test_the_order_in_which_items_are_named_does_not_count():
    items = [Item(5, 1, "b"), Item(0, 2, "c"), Item(5, 1, "a")]
    assert ChunkKeys(4, range(8), items=items).chunks() == ChunkKeys(4, range(8), items=items[::-1]).chunks()


def test_an_item_beyond_the_tokens_waits_for_them():
    keys = ChunkKeys(4, range(4), items=[Item(6, 1, "later")])
    assert keys.chunks() == ChunkKeys(4, range(4)).chunks()
    keys.extend(range(4, 8))
    assert keys.chunks() == ChunkKeys(4, range(8), items=[Item(6, 1, "later")]).chunks()
    assert keys.chunks() != ChunkKeys(4, range(8)).chunks()


def test_a_key_is_32_bytes():
    keys = ChunkKeys(4, range(6))
    assert {len(keys.at(end)) for end in range(1, 7)} == {KEY_BYTES} == {32}


@pytest.mark.parametrize(
    "ids",
    [
        [-1], [2**32], [1.5], ["1"], [None], "12",
        np.array([-1]), np.array([2**32]), np.array([1.0]), np.array([True]), np.array([[1]]),
        np.array(["1"]), np.array([2**64 - 1], np.uint64),
    ],
    ids=repr,
)  # fmt: skip
def test_refused_token_ids_add_nothing(ids):
    keys = ChunkKeys(2, [1, 2, 3])
    before = keys.chunks(), keys.at(3)
    with pytest.raises(Unnameable, match="token ids"):
        keys.extend(ids)
    assert (keys.chunks(), keys.at(3), len(keys)) == (*before, 3)


@pytest.mark.parametrize("end", [0, -1, 4])
def test_a_key_of_tokens_that_are_not_there_is_refused(end):
    with pytest.raises(Unnameable, match=f"a key at token {end} of a request of 3"):
        ChunkKeys(2, [1, 2, 3]).at(end)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: ChunkKeys(0), "chunks of 0 tokens"),
        (lambda: Item(-1, 1, "image"), "item 'image': 1 tokens from token -1"),
        (lambda: Item(0, 0, "image"), "item 'image': 0 tokens from token 0"),
    ],
)
def test_item_without_extent_is_refused(make, said):
    with pytest.raises(Unnameable, match=said):
        make()
