"""Time decode steps, prefills and hand-overs of engines whose KV caches have different layouts.

Each layout has a prefill and a decode engine with kvferry, each in a process of its own. Only the engines
that are measured run; the others are paused. In each round every layout does the same work once, in rotating
order. The first round is not counted. All layouts must answer with the same tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.attention.engine import LayoutEngine
from benchmarks.cpu_layouts import CPU_LAYOUTS
from benchmarks.handover.engine import Setup
from benchmarks.handover.in_process import EnginePair, engine_pair
from benchmarks.handover.measure import draw_prompt, meet
from benchmarks.handover.model import HandoverModel, write_model
from benchmarks.order import rotated
from kvferry.common.errors import TransferError

_LAYERS, _KV_HEADS, _HEAD_DIM, _ELEMENT_BYTES = 8, 2, 128, 4
_MODEL = HandoverModel(
    "qwen3",
    "8 full attention",
    "Qwen3Config",
    {
        "num_hidden_layers": _LAYERS,
        "num_key_value_heads": _KV_HEADS,
        "head_dim": _HEAD_DIM,
        # With smaller weights, a random model answers alike whatever its cache holds.
        "initializer_range": 0.1,
    },
)
_SPARE_TOKENS = 64
TOKEN_BYTES = 2 * _LAYERS * _KV_HEADS * _HEAD_DIM * _ELEMENT_BYTES
"""Number of bytes of KV cache per token."""

DECODE, PREFILL, HANDOVER, TRANSFER = "decode step", "prefill", "hand-over", "transfer"
MEASURES = (DECODE, PREFILL, HANDOVER, TRANSFER)
"""Measures, all in seconds.

`HANDOVER` is the time from a request's arrival at the decode engine to its first token. `TRANSFER` is the
part of it in which the KV is read.
"""

Found = dict[str, list[dict[str, float]]]
"""Seconds by measure, round and layout."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionJob:
    """The work of a run.

    Attributes:
        requests: number of requests that decode at once.
        context: length of their prompts, in tokens.
        steps: number of decode steps in each round.
        prompt: length of the prompt that is computed and handed over, in tokens.
        block_tokens: number of tokens per block.
        rounds: number of counted rounds.
    """

    requests: int
    context: int
    steps: int
    prompt: int
    block_tokens: int
    rounds: int

    @property
    def answer(self) -> int:
        """Number of tokens that each decoding request may generate: more than it does."""
        return (self.rounds + 1) * self.steps + 2 * self.requests + self.context // 8

    @property
    def longest(self) -> int:
        """Length of the longest request, in tokens."""
        return max(self.context + self.answer, self.prompt) + _SPARE_TOKENS

    @property
    def cache_bytes(self) -> int:
        """Size of an engine's KV cache, in bytes."""
        decoding = self.requests * (self.context + self.answer + self.block_tokens)
        return TOKEN_BYTES * (max(decoding, 2 * self.prompt) + 16 * self.block_tokens)


def measure(job: AttentionJob, *, folder: Path, progress: Callable[[str], None]) -> Found:
    """Run the same work with each layout; return the seconds of the counted rounds.

    Args:
        job: work of the run.
        folder: folder for the checkpoint.
        progress: function that is called with a line of text for each stage.

    Raises:
        TransferError: an engine does not start or does not answer, a prompt was not loaded, or two layouts
            gave different tokens.
    """
    progress(f"writing the checkpoint and starting {2 * len(CPU_LAYOUTS)} engines")
    model = write_model(_MODEL, folder / _MODEL.name, job.longest)
    # In float32, sums that differ in their last bits choose other tokens so rarely that none may differ.
    options: dict[str, Any] = {"dtype": "float32", "block_size": job.block_tokens}
    with ExitStack() as stack:
        pairs: dict[str, EnginePair] = {}
        for layout in CPU_LAYOUTS:
            setup = Setup(
                model=model, connector="kvferry", longest=job.longest, requests=job.requests,
                cache_bytes=job.cache_bytes, engine=options, threads=2, layout=layout,
            )  # fmt: skip
            pairs[layout] = stack.enter_context(engine_pair(setup, LayoutEngine, layout))
            with pairs[layout].running():
                meet(layout, pairs[layout])
        found: Found = {DECODE: _decode(job, pairs, progress), PREFILL: [], HANDOVER: [], TRANSFER: []}
        for number in range(job.rounds + 1):
            progress(f"prompts, round {number} of {job.rounds}")
            times = _hand_over(job, pairs, number)
            if number:
                for name, seconds in times.items():
                    found[name].append(seconds)
        return found


def _decode(
    job: AttentionJob, pairs: Mapping[str, EnginePair], progress: Callable[[str], None]
) -> list[dict[str, float]]:
    """Return the median seconds of a step, by round and layout."""
    prompts = [draw_prompt(job.context, number) for number in range(job.requests)]
    for layout, pair in pairs.items():
        progress(f"{layout}: computing {job.requests} prompts of {job.context} tokens")
        _alone(pair, "fill", prompts, job.answer)
    rounds = []
    for number in range(job.rounds + 1):
        progress(f"decode steps, round {number} of {job.rounds}")
        order = rotated(CPU_LAYOUTS, number)
        rounds.append({layout: median(_alone(pairs[layout], "decode_steps", job.steps)) for layout in order})
    check_equal({layout: _alone(pair, "end_requests") for layout, pair in pairs.items()})
    for pair in pairs.values():
        _alone(pair, "use_threads", 1)  # in a hand-over, the threads that move KV need a core
    return rounds[1:]


def _hand_over(
    job: AttentionJob, pairs: Mapping[str, EnginePair], number: int
) -> dict[str, dict[str, float]]:
    """Compute and hand over one prompt with each layout; return the seconds by measure and layout."""
    prompt = draw_prompt(job.prompt, 10_000 + number)
    times: dict[str, dict[str, float]] = {PREFILL: {}, HANDOVER: {}, TRANSFER: {}}
    said: dict[str, list[int]] = {}
    for layout in rotated(CPU_LAYOUTS, number):
        pair = pairs[layout]
        with pair.running():
            times[PREFILL][layout], params = pair.prefill.call("timed_prefill", prompt)
            ((stamps, token),) = pair.decode.call("decode", [prompt], [params])
            pair.decode.call("settle")
            pair.prefill.call("settle")
        if not stamps.received:
            raise TransferError(f"{layout}: the decode engine did not load the prompt")
        times[HANDOVER][layout] = stamps.answered - stamps.added
        times[TRANSFER][layout] = stamps.transfer_seconds
        said[layout] = [token]
    check_equal(said)
    return times


def _alone(pair: EnginePair, method: str, *arguments: Any) -> Any:
    """Call a method of the decode engine while all other engines are paused; return its result."""
    pair.decode.go_on()
    try:
        return pair.decode.call(method, *arguments)
    finally:
        pair.decode.stand_still()


def check_equal(said: Mapping[str, Sequence[Any]]) -> None:
    """Check that all layouts gave the same tokens.

    Raises:
        TransferError: the tokens of two layouts differ.
    """
    first = next(iter(said))
    for layout, answers in said.items():
        if answers != said[first]:
            raise TransferError(f"engines with {layout} and {first} gave different tokens")
