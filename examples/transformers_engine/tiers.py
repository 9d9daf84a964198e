"""Store a prompt's KV in one process, and continue the prompt in others.

The first two answers come from one process, each later answer from a process of its own. Processes share only
the folder with the chunks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import torch
from transformers import AutoTokenizer
from transformers.utils import logging

from examples.transformers_engine.engine import Answer, Engine, Request
from kvferry.tools.serving.tiny.tokenizer import passages

CHUNK_TOKENS, PROMPT_TOKENS, ANSWER_TOKENS = 64, 300, 16


class SpoiledEngine(Engine):
    """Engine that overwrites loaded KV with zeros after all checksums were verified: a negative control.

    Its answers must differ, which shows that the demonstration really uses loaded KV.
    """

    def load(self, request: Request) -> Counter[str]:
        """Load a prompt's KV as the base class does, then overwrite the request's blocks with zeros."""
        places = super().load(request)
        for numbers, blocks in zip(self.pages.groups, request.tables.blocks, strict=True):
            for number in numbers:
                self.pages.layers[number][[block.block_id for block in blocks]] = 0
        return places


def answer(checkpoint: Path, directory: Path, kind: type[Engine] = Engine, times: int = 1) -> list[Answer]:
    """Answer the same prompt several times, with an engine that has a host memory tier and a file tier.

    The stores of an answer finish before the next answer begins.

    Args:
        checkpoint: folder of the model.
        directory: folder of the file tier.
        kind: class of the engine.
        times: number of answers.
    """
    torch.set_num_threads(1)  # the model is too small for several threads
    logging.disable_progress_bar()
    tiers = [
        {"type": "host", "capacity": "64MiB"},
        {"type": "file", "path": str(directory), "capacity": "64MiB"},
    ]
    engine = kind(checkpoint, {"tiers": tiers, "chunk_tokens": CHUNK_TOKENS})
    answers = []
    try:
        for _ in range(times):
            answers.append(engine.generate(prompt(checkpoint), ANSWER_TOKENS))
            engine.finish_stores()
        return answers
    finally:
        engine.close()


def prompt(checkpoint: Path) -> list[int]:
    """Return the token ids of a prompt of English text.

    Args:
        checkpoint: folder of the model, for its tokenizer.
    """
    text = next(passages(8 * PROMPT_TOKENS))
    tokens: list[int] = AutoTokenizer.from_pretrained(checkpoint)(text)["input_ids"]
    return tokens[:PROMPT_TOKENS]


def damage(directory: Path) -> int:
    """Change one byte of every chunk file in a folder, and return the number of files."""
    files = list(directory.rglob("*.kv"))
    for file in files:
        content = bytearray(file.read_bytes())
        content[-1] ^= 1
        file.write_bytes(content)
    return len(files)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Answer of one step of the demonstration, and whether it is as expected.

    Attributes:
        what: description of the step.
        answer: answer of the engine.
        same: True if the answer's tokens equal those of the first answer.
        expected: True if `same` and the sources of the prompt's KV are as expected.
    """

    what: str
    answer: Answer
    same: bool
    expected: bool

    def __str__(self) -> str:
        """Return a description in three lines: the step, the sources of the prompt's KV, and the answer."""
        places = [f"{tokens} from {place}" for place, tokens in self.answer.loaded.items()]
        tokens = ", ".join([*places, f"{self.answer.computed} computed"])
        verdict = "as expected" if self.expected else "NOT as expected"
        return (
            f"{self.what}\n"
            f"  prompt tokens  {tokens}\n"
            f"  answer         {'the same' if self.same else 'another'}, {verdict}: "
            f"{' '.join(map(str, self.answer.token_ids))}"
        )


def in_new_process(call: Callable[[], list[Answer]]) -> list[Answer]:
    """Call a function in a new process, and return its result. The process ends after the call."""
    with ProcessPoolExecutor(1, get_context("spawn")) as process:
        return process.submit(call).result()


def demonstrate(
    checkpoint: Path,
    directory: Path,
    say: Callable[[str], None] = print,
    *,
    elsewhere: Callable[[Callable[[], list[Answer]]], list[Answer]] = in_new_process,
) -> bool:
    """Store a prompt's KV and continue the prompt in other processes; return True if all is as expected.

    Prints each answer, and includes two controls: overwritten KV and damaged files.

    Args:
        checkpoint: folder of the model.
        directory: empty folder for the file tier.
        say: function that prints a text.
        elsewhere: function that calls another one in a process that ends afterwards.
    """
    found: list[Outcome] = []

    def show(what: str, given: Answer, loaded: dict[str, int], *, same: bool = True) -> None:
        is_same = not found or given.token_ids == found[0].answer.token_ids
        expected = is_same == same and dict(given.loaded) == loaded
        found.append(Outcome(what=what, answer=given, same=is_same, expected=expected))
        say(str(found[-1]))

    first, second = elsewhere(partial(answer, checkpoint, directory, times=2))
    show("A process computes the prompt and stores its KV in host memory and in a directory.", first, {})
    show("It answers again.", second, {"host": PROMPT_TOKENS})
    (third,) = elsewhere(partial(answer, checkpoint, directory))
    show("That process has ended. A new one loads the KV from the directory.", third, {"file": PROMPT_TOKENS})
    (fourth,) = elsewhere(partial(answer, checkpoint, directory, SpoiledEngine))
    show(
        "Control: the loaded blocks are zeroed after all checks.", fourth, {"file": PROMPT_TOKENS}, same=False
    )
    files = damage(directory)
    (fifth,) = elsewhere(partial(answer, checkpoint, directory))
    show(f"Control: one byte of each of the {files} chunk files is changed; their checksums tell.", fifth, {})
    return all(one.expected for one in found)
