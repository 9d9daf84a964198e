"""The task: pairs of a key and a number, and at the end the number of the key that is asked for.

A prompt in the format of GSM8K, and the answer to it:

    Question: ba 17 ke 5 KE to 9
    Answer: #### 5

The key in capitals stands somewhere before the end, so a model needs two things: the key that is asked for,
and the pair. In a hybrid model the first comes from the sliding window or the recurrent state, and the second
from full attention, where the pair is anywhere.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Generator, Tensor

KEYS = tuple(map("".join, product("bdfghjklmnprstvw", "aeiouxyz")))
NUMBERS = 100
PAIRS = 112
"""Pairs in a question, each of another key."""
_SPECIAL = ("<s>", "</s>", "<pad>", "<unk>", "Question:", "Answer:", "####")
WORDS = (*_SPECIAL, *KEYS, *(key.upper() for key in KEYS), *map(str, range(NUMBERS)))
"""All tokens. The number of a token is its place in this list."""
SPECIAL_IDS = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
_END, _QUESTION, _ANSWER, _MARK = (_SPECIAL.index(word) for word in ("</s>", "Question:", "Answer:", "####"))
_KEY = len(_SPECIAL)
_ASKED = _KEY + len(KEYS)
_NUMBER = _ASKED + len(KEYS)
NOTHING = -1
"""Target of a token after which no certain token follows."""


@dataclass(frozen=True, slots=True)
class Sequences:
    """Sequences to train on: pairs, some of them several times, a key that is asked for, and the answer.

    Attributes:
        tokens: int64, (sequences, length).
        targets: token that follows each token, or `NOTHING`; int64, (sequences, length).
        pair: True where attention from the first position to the second one finds the number that follows;
            bool, (sequences, length, length).
        near: True where it finds the key of a number, or the key that is asked for; of the same shape.
        key: that key at each number and before the answer, or `NOTHING`; int64, (sequences, length).
    """

    tokens: Tensor
    targets: Tensor
    pair: Tensor
    near: Tensor
    key: Tensor


def draw(count: int, pairs: int, keys: int, gap: int, generator: Generator) -> Sequences:
    """Return random sequences.

    Args:
        count: number of sequences.
        pairs: number of pairs in each.
        keys: number of different keys in each.
        gap: number of pairs after the key that is asked for.
        generator: source of randomness.
    """
    import torch

    names = torch.rand(count, len(KEYS), generator=generator).argsort(1)[:, :keys]
    numbers = torch.randint(NUMBERS, (count, keys), generator=generator)
    again = torch.randint(keys, (count, pairs - keys), generator=generator)
    order = torch.cat([torch.arange(keys).expand(count, keys), again], 1)
    order = order.gather(1, torch.rand(count, pairs, generator=generator).argsort(1))
    key, number = names.gather(1, order), numbers.gather(1, order)
    is_repeated = (order[:, :, None] == order[:, None, :]).tril(-1).any(2)
    which = torch.randint(keys, (count, 1), generator=generator)
    asked, answer = names.gather(1, which), numbers.gather(1, which)
    no, none = torch.full((count, 1), NOTHING), torch.full_like(key, NOTHING)

    def row(first: Tensor, pair: tuple[Tensor, Tensor], *last: Tensor) -> Tensor:
        """Return a value per token: of the first one, of all pairs, and of the last five, asked key first."""
        flat = torch.stack(pair, 2).reshape(count, -1)
        at = 2 * (pairs - gap)
        return torch.cat([first, flat[:, :at], last[0], flat[:, at:], *last[1:]], 1)

    def column(token: int) -> Tensor:
        return torch.full((count, 1), token)

    end = column(_ANSWER), column(_MARK), answer + _NUMBER, column(_END)
    tokens = row(column(_QUESTION), (key + _KEY, number + _NUMBER), asked + _ASKED, *end)
    known = torch.where(is_repeated, number + _NUMBER, NOTHING)
    targets = row(no, (none, known), no, no, *end[1:]).roll(-1, 1)
    wanted = row(no, (torch.where(is_repeated, key, NOTHING), none), no, no, asked, no, no)
    held = row(no, (none, key), no, no, no, no, no)
    position = torch.arange(tokens.shape[1])
    earlier = position[:, None] > position
    pair = (wanted[:, :, None] >= 0) & (wanted[:, :, None] == held[:, None, :]) & earlier
    near = (held[:, :, None] >= 0) & (position[:, None] == position + 1)
    near[:, -3, 2 * (pairs - gap) + 1] = True
    told = row(no, (none, key + _KEY), no, no, asked + _KEY, no, no)
    return Sequences(tokens, targets, pair, near, told)


def questions(count: int, reach: int, seed: int) -> Iterator[dict[str, str]]:
    """Yield questions and answers, as in a file of questions.

    Args:
        count: number of questions.
        reach: greatest number of pairs after the key that is asked for.
        seed: seed of the questions.
    """
    rng = random.Random(seed)  # noqa: S311 - the same questions every time
    for number in range(count):
        keys = rng.sample(KEYS, PAIRS)
        values = [rng.randrange(NUMBERS) for _ in keys]
        words = [f"{key} {value}" for key, value in zip(keys, values, strict=True)]
        # Keys and gaps are spread evenly, so that every block of a prompt decides an answer.
        which, gap = number * PAIRS // count, number % (reach + 1)
        words.insert(PAIRS - gap, keys[which].upper())
        yield {"question": " ".join(words), "answer": f"#### {values[which]}"}


def write_tokenizer(folder: Path) -> None:
    """Write the tokenizer: a token is a word."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokenizer: Any = Tokenizer(models.WordLevel({word: n for n, word in enumerate(WORDS)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        unk_token="<unk>",
        clean_up_tokenization_spaces=False,
    )
    fast.save_pretrained(folder)


def write_questions(folder: Path, count: int, reach: int, seed: int) -> None:
    """Write a file of questions, ``questions.jsonl``. The arguments are those of `questions`."""
    lines = "".join(json.dumps(one) + "\n" for one in questions(count, reach, seed))
    (folder / "questions.jsonl").write_text(lines, encoding="utf-8")
