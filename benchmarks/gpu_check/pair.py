"""Two vLLM engines on one GPU: answers to prompts that are handed over, and the time to the first token."""

from __future__ import annotations

import tempfile
from contextlib import ExitStack
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from statistics import median

from benchmarks.gpu_check.job import GpuCheckJob
from benchmarks.gpu_check.result import CheckResult, CheckState, Figure, judged, ratio_figure
from benchmarks.handover.engine import Setup
from benchmarks.handover.in_process import EnginePair, engine_pair
from benchmarks.handover.measure import Load, draw_prompt, measure_work, meet
from benchmarks.handover.model import MODELS, write_model
from kvferry.common.errors import TransferError

NAME = "pair of vLLM engines"
PROMPTS = 16
LEAST_RIGHT = 12
"""Number of equal first tokens that proves the transfer: other kernels may flip some in bfloat16."""

_CONNECTORS = {"kvferry": "kvferry", "nixl": "NixlConnector"}
_COMPARED_TOKENS, _LAST_TOKEN, _SEED = 512, 7, 100_000
_SPARE_TOKENS = 64
_SHARE_OF_GPU = 0.2  # vLLM refuses to start without so much free memory


def check_pair(job: GpuCheckJob) -> CheckResult:
    """Hand prompts over between two engines, compare the answers with one engine's, and time both connectors.

    Args:
        job: device and sizes.

    Raises:
        TransferError: an engine does not start, or a connector did not load a prompt.
    """
    if find_spec("vllm") is None:
        return CheckResult(NAME, CheckState.NOT_RUN, "vLLM is not installed.")
    model = MODELS[0]
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        common = Setup(
            model=write_model(model, Path(folder, model.name), job.read_tokens + _SPARE_TOKENS),
            connector="",
            longest=job.read_tokens + _SPARE_TOKENS,
            requests=PROMPTS,
            cache_bytes=512 << 20,
            engine={**model.engine, **({"gpu_memory_utilization": _SHARE_OF_GPU} if job.on_gpu else {})},
            device=job.device,
        )
        pairs = {
            name: stack.enter_context(engine_pair(replace(common, connector=name))) for name in _CONNECTORS
        }
        for name, pair in pairs.items():
            with pair.running():
                meet(name, pair)
        with pairs["kvferry"].running():
            runner = pairs["kvferry"].prefill.call("runner")
        figures = compare(pairs["kvferry"], job)
        times = measure_work(pairs, Load(job.read_tokens, 1), job.repeats)
    seconds = {name: median(one.seconds for one in found) for name, found in times.items()}
    figures += [
        Figure(f"first token of {job.read_tokens} tokens, {title}", f"{seconds[name] * 1e3:.1f} ms")
        for name, title in _CONNECTORS.items()
    ]
    figures.append(
        ratio_figure(
            "NixlConnector's time as a multiple of kvferry's", seconds["nixl"] / seconds["kvferry"], None
        )
    )
    says = f"Answers are those of one engine, and depend on what was handed over (model runner V{runner})."
    return judged(NAME, says, figures)


def compare(pair: EnginePair, job: GpuCheckJob) -> list[Figure]:
    """Compare the first tokens of prompts that end alike: only the KV before the end tells them apart.

    Args:
        pair: engines with kvferry.
        job: sizes.

    Raises:
        TransferError: kvferry did not load a prompt.
    """
    tokens = min(_COMPARED_TOKENS, job.read_tokens // 2)
    prompts = [[*draw_prompt(tokens, _SEED + number)[:-1], _LAST_TOKEN] for number in range(PROMPTS)]
    with pair.running():
        alone = pair.prefill.call("alone", prompts)
        pair.prefill.call("settle")
        handed = pair.hand_over(prompts)
    if not handed.loaded:
        raise TransferError("kvferry did not load a prompt")
    right = sum(a == b for a, b in zip(handed.tokens, alone, strict=True))
    return [
        _of_prompts("first tokens equal to those of one engine", right),
        _of_prompts("distinct first tokens of prompts that end alike", len(set(handed.tokens))),
    ]


def _of_prompts(what: str, number: int) -> Figure:
    return Figure(what, f"{number} of {PROMPTS}", f"at least {LEAST_RIGHT}", number >= LEAST_RIGHT)
