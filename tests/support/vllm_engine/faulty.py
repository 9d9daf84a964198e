"""A family's engine with tiers and a small KV cache, and what the same engine says without tiers."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvferry.tools.serving.tiny import FAMILIES, tiny_checkpoint
from support.vllm_engine.inside import distance
from support.vllm_engine.process import Engine
from support.vllm_engine.tiered import STEP, Tiered


@dataclass(frozen=True)
class Case:
    """An engine.

    Attributes:
        family: of `kvferry.tools.serving.tiny`.
        options: of the engine.
        settings: of the connector.
        exact: the engine agrees with itself to the last bit, however a prompt is cut and batched.
    """

    family: str
    options: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    exact: bool = True

    def __str__(self) -> str:
        return self.family


class Plain:
    """What an engine without a connector, and with room for everything, says to prompts."""

    def __init__(self, case: Case, checkpoints: Path, log: Path, texts: list[list[int]], tokens: int) -> None:
        """Start it, ask it everything, and stop it.

        Args:
            case: the engine.
            checkpoints: folder of checkpoints.
            log: file for what it prints.
            texts: prompts.
            tokens: of an answer.
        """
        model = str(tiny_checkpoint(case.family, checkpoints))
        options = {**FAMILIES[case.family].engine_options(), **STEP, **case.options}
        options.pop("num_gpu_blocks_override", None)
        engine = Engine(log, model=model, **options)
        try:
            engine.ready()
            answers = engine.call("generate", texts, tokens=tokens)
            self._answers = dict(zip(map(tuple, texts), answers, strict=True))
            self._gap = 0.0 if case.exact else engine.call("own_gap", texts[:4], timeout=280.0)
        finally:
            engine.close()

    def agree(self, text: list[int], answer: dict[str, Any]) -> None:
        """Assert that an answer to a prompt, which may be shorter, is the engine's own."""
        reference, count = self._answers[tuple(text)], len(answer["tokens"])
        assert answer["finish"] == "length"
        apart = distance(answer, {**reference, "logprobs": reference["logprobs"][:count]})
        assert apart <= 2 * self._gap + 1e-5, f"{apart} apart, the engine's own gap is {self._gap}"


class Faulty(Tiered):
    """An engine with tiers to which things happen."""

    def __init__(self, case: Case, checkpoints: Path, folder: Path, plain: Plain, **tiered: Any) -> None:
        super().__init__(
            case.family,
            checkpoints,
            folder / "chunks",
            folder / "engine.log",
            case.options,
            case.settings,
            **tiered,
        )
        self.case, self.plain = case, plain
        self._free = self.engine.call("free_blocks")

    def right(self, texts: list[list[int]], tokens: int = 8) -> dict[str, list[int]]:
        """Assert that the engine answers as one without tiers, to all prompts at once.

        Returns:
            Tokens that came from the tiers, per admission, by request.
        """
        self.engine.call("admitted")
        answers = self.engine.call("generate", texts, tokens=tokens)
        for text, answer in zip(texts, answers, strict=True):
            self.plain.agree(text, answer)
        hits: dict[str, list[int]] = {}
        for name, _, tokens_loaded in self.engine.call("admitted"):
            hits.setdefault(name, []).append(tokens_loaded)
        return hits

    def nothing_held(self) -> None:
        """Assert that no request, load or store holds anything, and as many blocks are free as at first."""
        self.settle()
        held = self.engine.call("held")
        assert not held, held
        self.forget()
        free = self.engine.call("free_blocks")
        assert free == self._free, f"{free} blocks are free, {self._free} were"
