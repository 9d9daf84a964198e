"""Lead a conversation through a prefill and a decode engine, and record what the decode engine reads.

The decode engine has the KV of the earlier turns: it has loaded their prompts and computed their answers. The
new part of a turn is the last token of the answer before, and the question.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.engine_process import EngineProcess
from benchmarks.turns.engine import EngineSetup, TurnAnswer, TurnsEngine
from kvferry.tools.serving.router.bodies import ASK_FOR_KV
from kvferry.tools.serving.tiny import tiny_checkpoint
from kvferry.tools.serving.tiny.families import family

_OPTIONS: dict[str, dict[str, Any]] = {
    # By default vLLM disables prefix caching for this family. With it, vLLM cannot compute in float32.
    "nemotronh": {"enable_prefix_caching": True, "dtype": "bfloat16"},
}
"""Arguments of `vllm.LLM` by family, in addition to the family's own."""
_STEP_TOKENS = 256
_TOKENS = 10, 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """The lengths of a conversation.

    Attributes:
        turns: number of turns.
        first: number of tokens of the first prompt.
        question: number of tokens that each further turn adds after the last answer.
        answer: number of tokens of each answer.
    """

    turns: int
    first: int
    question: int
    answer: int

    @property
    def longest(self) -> int:
        """Number of tokens of the last turn, with its answer."""
        return self.first + (self.turns - 1) * (self.answer + self.question) + self.answer


@dataclass(frozen=True, slots=True)
class TurnLoad:
    """The tokens and bytes that the decode engine read for one turn.

    Attributes:
        prompt: number of tokens of the prompt.
        known: number of tokens at its start that the engine had: those of the last turn, without the last
            token of its answer, whose KV was never computed.
        begin, end: range of the loaded tokens.
        bytes_by_group: number of bytes that were read, by label of the KV cache group.
    """

    prompt: int
    known: int
    begin: int
    end: int
    bytes_by_group: dict[str, int]

    @property
    def total_bytes(self) -> int:
        """Number of bytes that were read."""
        return sum(self.bytes_by_group.values())

    @property
    def state_bytes(self) -> int:
        """Number of these bytes that are recurrent state."""
        return sum(size for label, size in self.bytes_by_group.items() if label.endswith(" state"))

    @property
    def again(self) -> int:
        """Number of tokens whose attention KV was read although the engine had it."""
        return max(0, self.known - self.begin)


@dataclass(frozen=True, slots=True)
class FamilyTurns:
    """The loads of a conversation with one model family.

    Attributes:
        family: name of the family.
        block_tokens: number of tokens per block.
        without: load of each turn if the engine shares only what all KV cache groups have.
        shared: load of each turn if the engine shares its attention blocks.
    """

    family: str
    block_tokens: int
    without: tuple[TurnLoad, ...]
    shared: tuple[TurnLoad, ...]


def measure(
    name: str, conversation: Conversation, folder: Path, progress: Callable[[str], None]
) -> FamilyTurns:
    """Lead the conversation twice: without and with shared attention blocks.

    Args:
        name: name of a tiny model family.
        conversation: lengths of the conversation.
        folder: folder for checkpoints.
        progress: function that is called with a line of text for each pair of engines.

    Raises:
        TransferError: an engine does not start or does not answer, or a load has failed.
    """
    model = tiny_checkpoint(name, folder)
    options = {
        "max_model_len": conversation.longest + 1,
        "max_num_batched_tokens": _STEP_TOKENS,
        **family(name).engine_options(),
        **_OPTIONS.get(name, {}),
    }
    found = []
    for shares in (False, True):
        progress(f"{name}: a conversation {'with' if shares else 'without'} shared attention blocks")
        setup = EngineSetup(model, options, shares)
        with (
            EngineProcess("prefill", TurnsEngine, setup) as prefill,
            EngineProcess("decode", TurnsEngine, setup) as decode,
        ):
            prefill.wait_ready()
            decode.wait_ready()
            block_tokens = prefill.call("block_tokens")
            found.append(lead(conversation, prefill, decode))
    return FamilyTurns(name, block_tokens, *found)


def lead(conversation: Conversation, prefill: EngineProcess, decode: EngineProcess) -> tuple[TurnLoad, ...]:
    """Send all turns of a conversation through two engines; return what the decode engine read for each.

    Args:
        conversation: lengths of the conversation. Its tokens are random, the same in each call.
        prefill: engine that computes the prompts.
        decode: engine that reads them and answers.

    Raises:
        TransferError: an engine does not answer, or a load has failed.
    """
    words = np.random.default_rng(1)
    said: list[int] = []
    known, loads = 0, []
    for turn in range(conversation.turns):
        said += words.integers(*_TOKENS, conversation.question if turn else conversation.first).tolist()
        offer = prefill.call("ask", said, 1, dict(ASK_FOR_KV)).params
        answer = decode.call("ask", said, conversation.answer, offer)
        loads.append(_load(said, known, answer))
        said += answer.tokens
        known = len(said) - 1
    return tuple(loads)


def _load(prompt: list[int], known: int, answer: TurnAnswer) -> TurnLoad:
    return TurnLoad(len(prompt), known, answer.begin, answer.end, answer.bytes_by_group)
