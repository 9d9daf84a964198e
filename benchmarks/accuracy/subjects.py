"""The models that are evaluated: the user's own, and those that come with questions."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.accuracy.questions import EXAMPLES
from benchmarks.accuracy.recall.models import MODELS, Trained
from benchmarks.accuracy.ways import Way
from kvferry.common.errors import ConfigError
from kvferry.tools.models.read import read_model
from kvferry.tools.serving.devices import visible_devices
from kvferry.tools.serving.smollm2 import SMOLLM2, missing_smollm2, smollm2_checkpoint

_FACTS = Path(__file__).with_name("facts.jsonl")
_ENGINE = ("--enforce-eager", "--max-model-len=2048", "--max-num-seqs=8", "--kv-cache-memory-bytes=536870912")


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """A model to evaluate.

    Attributes:
        name: name in the report.
        model: path or id that vLLM can load.
        questions: file of questions; None for GSM8K.
        examples: number of solved questions at the start of each prompt.
        arguments: arguments of vLLM's API server.
    """

    name: str
    model: str
    questions: Path | None = None
    examples: int = EXAMPLES
    arguments: Sequence[str] = ()

    def can_show(self, way: Way) -> bool:
        """Return False if a way spoils only kinds of KV cache groups that the model does not have."""
        config = Path(self.model, "config.json")
        if not way.spoils or not config.is_file():
            return True
        kinds = {layer.kind for layer in read_model(json.loads(config.read_bytes())).cache.layers}
        return not kinds.isdisjoint(way.spoils)


def read_subjects(names: str, questions: Path | None, arguments: Sequence[str]) -> Sequence[Subject]:
    """Return the models of a list of paths, ids or names, separated by commas.

    Args:
        names: the list.
        questions: file of questions for models that come without; None for GSM8K.
        arguments: further arguments of vLLM's API server.

    Raises:
        ConfigError: SmolLM2 is not in the user's cache.
    """
    found = [_subject(name.strip(), questions) for name in names.split(",")]
    return [replace(one, arguments=(*one.arguments, *arguments)) for one in found]


def _subject(name: str, questions: Path | None) -> Subject:
    if name in MODELS:
        return _trained(MODELS[name])
    if name != SMOLLM2:
        return Subject(name=name, model=name, questions=questions)
    if missing := missing_smollm2():
        raise ConfigError(missing)
    return Subject(name=name, model=str(smollm2_checkpoint()), questions=_FACTS, arguments=_engine())


def _trained(trained: Trained) -> Subject:
    folder = trained.folder
    return Subject(
        name=trained.name,
        model=str(folder),
        questions=folder / "questions.jsonl",
        examples=0,
        arguments=(*_engine(), *trained.engine),
    )


def _engine() -> Sequence[str]:
    # In float32 a CPU gives the same text however requests are batched.
    return (*_ENGINE, f"--dtype={'bfloat16' if visible_devices().gpus else 'float32'}")
