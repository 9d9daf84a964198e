"""The families of a campaign, and what a single engine without kvferry says to its prompts.

An answer is right if its logprobs are the single engine's. How close they must be depends on vLLM's kernels,
so it was measured on the plain engine: a prompt alone and among others, its answer decoded and computed as
part of a prompt.

- Gemma 3, Qwen 3 with adapters, and Nemotron-H in float32 with steps of one block agree to 1e-5.
- LFM2 and Qwen3-Next do not (0.09 and 0.47 at worst), so Nemotron-H stands for models with recurrent state.
- MLA differs from itself by up to 0.06. Its tolerance is measured at every start. With protections switched
  off, the campaign shows that wrong answers are farther away.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from support.lora import random_adapter
from support.vllm_engine.checkpoints import checkpoint_of, family_of
from support.vllm_engine.inside import distance
from support.vllm_engine.pair import prompt
from support.vllm_engine.process import Engine

TOKENS = 6
LENGTHS = (70, 129, 200, 256, 300, 330, 390, 450)
"""Of prompts: one chunk and more, whole chunks, longer than a window and than a step."""
PROMPTS = 24
TOLERANCE = 1e-4
"""Of logprobs, for engines that agree with themselves however a prompt is cut and batched."""
LONG_TOKENS = 240
"""Of answers that make a pool too small."""
_LORA = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8}


@dataclass(frozen=True)
class Family:
    """Engines of one architecture.

    Attributes:
        name: of `kvferry.tools.serving.tiny`.
        options: of both engines.
        prefill, decode: of one, on top.
        single: of the engine without kvferry, on top of the architecture's own.
        connector: settings of both connectors.
        adapters: LoRA adapters; every prompt is asked with one of them, and none is asked without, since
            vLLM's CPU kernels give requests without an adapter the one loaded last.
        exact: the engine agrees with itself.
    """

    name: str
    options: dict[str, Any] = field(default_factory=dict)
    prefill: dict[str, Any] = field(default_factory=dict)
    decode: dict[str, Any] = field(default_factory=dict)
    single: dict[str, Any] = field(default_factory=dict)
    connector: dict[str, Any] = field(default_factory=dict)
    adapters: int = 0
    exact: bool = True

    def options_of(self, role: str) -> dict[str, Any]:
        """Options of the prefill, decode or single engine."""
        more = {} if role == "single" else self.options
        lora = _LORA if self.adapters else {}
        return {**family_of(self.name).engine_options(), **lora, **more, **getattr(self, role)}


_STATES = {
    "enable_prefix_caching": True, "max_num_batched_tokens": 128, "prefix_cache_retention_interval": 128,
}  # fmt: skip
FAMILIES = {
    one.name: one
    for one in (
        Family(
            "gemma3",
            {"max_num_batched_tokens": 256, "block_size": 64, "max_num_seqs": 16},
            {"num_gpu_blocks_override": 400},
            {"num_gpu_blocks_override": 115},
            {"max_num_batched_tokens": 256},
        ),
        Family(
            "qwen3",
            {"max_num_batched_tokens": 256, "max_num_seqs": 16},
            {"block_size": 32, "num_gpu_blocks_override": 400},
            {"block_size": 64, "num_gpu_blocks_override": 60},
            {"max_num_batched_tokens": 256},
            {"strategy": "staged"},
            adapters=2,
        ),
        Family(
            "nemotronh",
            {**_STATES, "max_num_seqs": 16},
            {"num_gpu_blocks_override": 300},
            {"num_gpu_blocks_override": 80},
            _STATES,
        ),
        Family(
            "dsv3",
            {"max_num_seqs": 16},
            {"num_gpu_blocks_override": 1600},
            {"num_gpu_blocks_override": 210},  # the long prompts together fill them but for some
            exact=False,
        ),
    )
}


class References:
    """What a single engine without a connector says to the prompts of a family.

    Attributes:
        texts, long: the prompts.
        model: the checkpoint.
        adapters: folders of LoRA adapters.
        tolerance: largest distance of a right answer.
    """

    def __init__(self, family: Family, checkpoints: Path, folder: Path) -> None:
        """Start the engine, ask it everything, and stop it."""
        self.texts = [prompt(LENGTHS[n % len(LENGTHS)] + n, 7000 + n) for n in range(PROMPTS)]
        self.long = [prompt(620 + 10 * n, 9000 + n) for n in range(4)]
        model = checkpoint_of(family.name, checkpoints)
        self.model = str(model)
        self.adapters = [random_adapter(model, folder / f"adapter {n}", n) for n in range(family.adapters)]
        self._own = {
            tuple(text): self.adapters[n % len(self.adapters)] if self.adapters else ""
            for n, text in enumerate(self.texts + self.long)
        }
        self._answers: dict[tuple[tuple[int, ...], str], dict[str, Any]] = {}
        self._single = Engine(folder / "single.log", model=self.model, **family.options_of("single"))
        try:
            self._single.ready()
            self._ask()
            self.tolerance = TOLERANCE if family.exact else 2 * self._gap()
        finally:
            self._single.close()

    def _ask(self) -> None:
        """Ask every prompt with its adapter, all at once, and the shorter ones with the other adapters."""
        by_adapter = defaultdict(list)
        for text in self.texts + self.long:
            by_adapter[self.adapter_of(text)].append(text)
        for adapter, texts in by_adapter.items():
            self._keep([text for text in texts if text not in self.long], adapter, TOKENS)
            self._keep([text for text in texts if text in self.long], adapter, LONG_TOKENS)
        for adapter in self.adapters:
            self._keep([text for text in self.texts if self.adapter_of(text) != adapter], adapter, TOKENS)

    def _keep(self, texts: list[list[int]], adapter: str, tokens: int) -> None:
        found = self._generate(texts, adapter, tokens)
        self._answers |= {(tuple(text), adapter): one for text, one in zip(texts, found, strict=True)}

    def _generate(self, texts: list[list[int]], adapter: str, tokens: int) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self._single.call(
            "generate", texts, tokens=tokens, adapter=adapter or None
        )
        return found

    def _gap(self) -> float:
        """How far the engine is from itself: alone and among others, decoded and as part of a prompt."""
        gap = 0.0
        for text in self.texts + self.long:
            among = self._answers[tuple(text), ""]
            count = len(among["tokens"])
            (alone,) = self._generate([text], "", count)
            (longer,) = self._generate([text + alone["tokens"][:1]], "", count - 1)
            rest = {name: alone[name][1:] for name in ("tokens", "logprobs")}
            gap = max(gap, distance(alone, among), distance(rest, longer))
        return gap

    def adapter_of(self, text: list[int]) -> str:
        """The adapter that a prompt is asked with; empty if none."""
        return self._own[tuple(text)]

    def other_adapter(self, text: list[int]) -> str:
        """An adapter that is not the prompt's own."""
        return next(one for one in self.adapters if one != self.adapter_of(text))

    def why_wrong(self, text: list[int], answer: dict[str, Any], adapter: str | None = None) -> str:
        """Why an answer is not the single engine's; empty if it is."""
        of = self.adapter_of(text) if adapter is None else adapter
        reference, count = self._answers[tuple(text), of], len(answer["tokens"])
        if answer["finish"] != "length":
            return f"it ended with {answer['finish']!r}"
        cut = {"tokens": reference["tokens"][:count], "logprobs": reference["logprobs"][:count]}
        apart = distance(answer, cut)
        if apart > self.tolerance:
            return f"a prompt of {len(text)} tokens: {apart:.3g} from the single engine's answer"
        return ""
