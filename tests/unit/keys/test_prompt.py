"""The digest of a prompt: the same everywhere, another for any other prompt."""

import os
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import assume, given, strategies as st

from kvferry.keys import prompt_digest
from support.examples import examples

TOKENS = st.lists(st.integers(0, 2**31 - 1), max_size=20)
EXTRAS = st.lists(st.text(max_size=5), max_size=3)
QUICK = examples(50)


def test_the_digest_is_fixed_for_ever():
    assert prompt_digest([1, 2, 3]) == "dd2650604e70482874fa90997cb7dc1e"
    assert prompt_digest([1, 2, 3], ["adapter", "salt"]) == "a693b26ecdd6bee9c37a65b5e88b162b"


def test_prompt_digest_does_not_depend_on_the_hash_seed():
    program = "from kvferry.keys import prompt_digest as p; print(p([1, 2, 3], ['adapter', 'salt']))"
    for seed in ("0", "12345"):
        output = subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True, text=True, check=True,
        ).stdout  # fmt: skip
        assert output.strip() == prompt_digest([1, 2, 3], ["adapter", "salt"])


def test_prompt_digest_does_not_depend_on_the_type_of_the_tokens():
    wanted = prompt_digest([1, 2, 300])
    for tokens in ((1, 2, 300), np.array([1, 2, 300], np.int32), np.array([1, 2, 300], ">i8"), range(0)):
        assert (prompt_digest(tokens) == wanted) == (len(tokens) == 3)


@QUICK
@given(TOKENS, EXTRAS, TOKENS, EXTRAS)
def test_other_tokens_or_extras_have_another_digest(tokens, extras, other_tokens, other_extras):
    assume((tokens, extras) != (other_tokens, other_extras))
    assert prompt_digest(tokens, extras) != prompt_digest(other_tokens, other_extras)


@QUICK
@given(TOKENS, EXTRAS)
def test_prompt_digest_is_32_hex_digits(tokens, extras):
    digest = prompt_digest(tokens, extras)
    assert len(digest) == 32
    assert int(digest, 16) >= 0


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (([], ["ab", "c"]), ([], ["a", "bc"])),
        (([], ["a"]), ([], ["a", ""])),
        (([], []), ([0], [])),
        (([1, 2], []), ([2, 1], [])),
        # Tokens that spell the length and the bytes of an extra.
        (([8, 1], []), ([], ["\x01\0\0\0\0\0\0\0"])),
        (([1, ord("a")], []), ([], ["a"])),
    ],
)
def test_similar_prompts_have_different_digests(one, other):
    assert prompt_digest(*one) != prompt_digest(*other)


def test_order_of_extras_counts():
    assert prompt_digest([], ["a", "b"]) != prompt_digest([], ["b", "a"])


def test_half_a_surrogate_pair_has_a_digest_of_its_own():
    halves = ["\ud800", "\udfff", "\ufffd", "?", ""]
    assert len({prompt_digest([], [half]) for half in halves}) == len(halves)
