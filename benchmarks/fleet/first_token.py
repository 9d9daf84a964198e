"""Measure the first token of prompts that another vLLM engine has in host memory, beside computing them."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.checkpoint import VOCABULARY, token_bytes, write_checkpoint
from benchmarks.engine_process import EngineProcess
from benchmarks.served import FirstAnswer, SteppedEngine, tiered
from kvferry.common.errors import TransferError
from kvferry.tiers.names import FLEET

_MODEL = {"num_key_value_heads": 8, "head_dim": 128, "initializer_range": 0.1}
# The engine computes a prompt in one step, and pins at most a quarter of its blocks for stores. So it has
# memory for more than four prompts.
_CACHED_PROMPTS, _STORED_PROMPTS = 5, 4
_SPARE_TOKENS = 2
_START_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class FirstTokens:
    """Times to the first token of prompts of one length, in seconds, round by round."""

    tokens: int
    kv_bytes: int
    computed: tuple[float, ...]
    read: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class _Setup:
    model: Path
    longest: int
    engines: tuple[str, ...] = ()


class FleetEngine:
    """A vLLM engine with host memory and a fleet tier."""

    def __init__(self, setup: _Setup) -> None:
        """Start the engine, which takes tens of seconds."""
        each = setup.longest * token_bytes(_MODEL)
        fleet: dict[str, Any] = {"type": FLEET, "engines": list(setup.engines), "find_seconds": 1.0}
        tiers = [{"type": "host", "capacity": _STORED_PROMPTS * each}, fleet]
        self._served = SteppedEngine(
            setup.model, setup.longest, 1, _CACHED_PROMPTS * each, tiered(tiers), setup.longest
        )
        (half,) = self._served.halves
        (slow,) = half._tiering._cache.slow_tiers  # noqa: SLF001 - the port is any free one
        self._tier = slow.tier
        if not self._tier.ready.wait(_START_SECONDS) or self._tier.server is None:
            raise TransferError("the fleet tier has not started; see the lines above")

    def address(self) -> str:
        """Return the address of the fleet channel."""
        return f"127.0.0.1:{self._tier.server.port}"

    def answer(self, prompt: Sequence[int]) -> FirstAnswer:
        """Return the first token of a prompt of which this engine has nothing by itself."""
        self._served.forget(host=True)
        self._served.zero_blocks()
        answer = self._served.first_answer(prompt)
        self._served.settle()
        return answer

    def close(self) -> None:
        """Stop the engine."""
        self._served.close()


def measure_first_tokens(
    lengths: Sequence[int], rounds: int, path: Path, progress: Callable[[str], None]
) -> list[FirstTokens]:
    """Let one engine compute prompts, and another one read them. The first round does not count.

    Raises:
        TransferError: an engine does not start, a prompt was not read, or its first token is wrong.
    """
    longest, chance = max(lengths) + _SPARE_TOKENS + 1, random.Random(1)  # noqa: S311 - no secret
    with TemporaryDirectory(prefix="bench-", dir=path) as folder:
        model = write_checkpoint(Path(folder) / "model", longest, _MODEL)
        progress("starting two engines")
        with EngineProcess("holder", FleetEngine, _Setup(model, longest)) as holder:
            holder.wait_ready()
            setup = _Setup(model, longest, (holder.call("address"),))
            with EngineProcess("reader", FleetEngine, setup) as reader:
                reader.wait_ready()
                found = []
                for tokens in lengths:
                    times = []
                    for number in range(rounds + 1):
                        progress(f"{tokens:,} tokens, round {number} of {rounds}")
                        times.append(_round(holder, reader, tokens, chance))
                    computed, read = zip(*times[1:], strict=True)
                    found.append(FirstTokens(tokens, tokens * token_bytes(_MODEL), computed, read))
    return found


def _round(
    holder: EngineProcess, reader: EngineProcess, tokens: int, chance: random.Random
) -> tuple[float, float]:
    """Return the seconds in which the reader computes a new prompt, and reads one from the holder."""
    theirs, new = (
        [chance.randrange(10, VOCABULARY) for _ in range(tokens + _SPARE_TOKENS)] for _ in range(2)
    )
    expected: FirstAnswer = holder.call("answer", theirs)
    calls = [theirs, new]
    chance.shuffle(calls)
    answers = {id(prompt): reader.call("answer", prompt) for prompt in calls}
    read, computed = answers[id(theirs)], answers[id(new)]
    if read.token != expected.token or read.hit_tokens < tokens or computed.hit_tokens:
        raise TransferError(
            f"a prompt of {tokens} tokens was read with {read.hit_tokens} tokens from the other engine, and "
            f"its first token is {read.token}, expected {expected.token}: please report this"
        )
    return computed.seconds, read.seconds
