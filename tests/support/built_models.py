"""Layers and groups that vLLM builds of every known model, recorded: building all of them takes minutes.

`PYTHONPATH=src:tests python -m support.built_models` builds them in a process of their own
(`support.vllm_engine.built`), in full size and without memory for weights, and writes `built_models.json`.
"""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

from kvferry.tools.models import read_model
from kvferry.tools.plan.find import entries
from support.families import ARCHITECTURES, default_config
from support.vllm_engine.built import ask

RECORD = Path(__file__).with_suffix(".json")
RENEW = "run `PYTHONPATH=src:tests python -m support.built_models` and look at what changes"

TABLE = {
    entry.name: {key: value for key, value in entry.config.items() if key != "quantization_config"}
    for entry in entries()
}
MIXED = {
    name: kinds
    for name, config in TABLE.items()
    if len(stores := set(read_model(config).cache.layers)) > 1 and (kinds := {store.kind for store in stores})
}
"""Kinds of layers of those models whose layers differ, so that vLLM derives blocks and groups."""
NOT_BUILT = {
    "Llama-4-Maverick-17B-128E": "vLLM asks for the processor's files of Llama 4",
    "Llama-4-Scout-17B-16E": "vLLM asks for the processor's files of Llama 4",
    "MiMo-7B-Base": "its configuration class is remote code",
}
"""Entries of the table that vLLM cannot build here, and why."""
BUILT = [
    (name, tp) for name in TABLE if name not in NOT_BUILT for tp in ((1, 2, 4, 8) if name in MIXED else (1,))
]
"""Entries of the table, and tensor-parallel ranks: where all layers are alike, ranks only share out heads."""
FAMILIES_NOT_BUILT = {
    "hy_v3": "its class writes other names of its experts' keys than vLLM reads",
    "kimi_linear": "its class names no layers; Kimi-K3 of the table is built",
    "lfm2_moe": "its class names no layers; lfm2 is built",
    "llama4_text": "vLLM asks for the processor's files of Llama 4",
    "olmo_hybrid": "vLLM needs Triton for its recurrence",
    "step3p5": "its class has no sizes of its own",
    "zamba2": "its class leaves out what vLLM reads",
}
FAMILIES = [each for each in ARCHITECTURES if each not in FAMILIES_NOT_BUILT]
QUESTIONS = [*BUILT, *((each, 1) for each in FAMILIES)]

_ALSO = ("architectures", "rope_parameters", "rope_scaling", "sparse_attention_config")
_NOT_ALSO = ("attention_k_eq_v", "num_global_key_value_heads", "num_key_value_heads", "head_dim")
"""Keys of a family that say what else a file says, and keys that its models set or leave out."""
_SMALLER = {"gemma3n_text": {"hidden_size": 256}, "minimax_m3_text": {"sparse_attention_config": None}}
"""Keys that decide no cache and are built otherwise than the file has them: some must fit into memory."""
_TYPES = {"minimax_m3": "minimax_m3_text"}
"""Model types of files whose language model vLLM calls otherwise."""


def config_of(name: str) -> dict[str, Any]:
    """Return the configuration of a model of the table, or of a family as its class has it."""
    return TABLE[name] if name in TABLE else default_config(name)


def recorded(name: str, tp: int) -> dict[str, Any]:
    """Return vLLM's answer from the record. Fail if it is of another configuration."""
    found = _record().get(_key(name, tp))
    assert found is not None, f"no record of {name} on {tp} ranks: {RENEW}"
    assert found["config"] == _digest(name), f"the record is of another configuration of {name}: {RENEW}"
    return found


def build(questions: Iterable[tuple[str, int]]) -> dict[tuple[str, int], dict[str, Any]]:
    """Build models with vLLM, and return its answers in the record's form."""
    asked = list(questions)
    answers = ask((_for_vllm(config_of(name)), tp) for name, tp in asked)
    return {
        (name, tp): {"config": _digest(name), **_short(name, answer)}
        for (name, tp), answer in zip(asked, answers, strict=True)
    }


@cache
def _record() -> dict[str, dict[str, Any]]:
    return json.loads(RECORD.read_text())


def _key(name: str, tp: int) -> str:
    return f"{name} tp={tp}"


def _digest(name: str) -> str:
    config = {key: value for key, value in config_of(name).items() if key != "transformers_version"}
    return hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest()[:12]


def _for_vllm(config: dict[str, Any]) -> dict[str, Any]:
    """The configuration, with the keys from the family's class that decide no cache."""
    config = {**config, "model_type": _TYPES.get(config["model_type"], config["model_type"])}
    family = default_config(config["model_type"])
    rest = {
        name: value
        for name, value in family.items()
        if name in _ALSO or not (isinstance(value, list | dict) or name in _NOT_ALSO)
    }
    return {**rest, **config, **_SMALLER.get(config["model_type"], {})}


def _short(name: str, answer: dict[str, Any]) -> dict[str, Any]:
    """Layers by what they keep: [spec, attention span, heads, bytes of an entry or snapshot, tokens, layers].

    Groups by set-up, only where layers differ: [[spec, tokens of a block, layers], ...] for each group.
    """
    if "error" in answer:
        return {"error": answer["error"].rpartition(" (")[0]}
    layers = defaultdict[tuple[Any, ...], list[int]](list)
    for layer in answer["layers"]:
        if spec := layer.get("spec"):
            kept = layer.get("reach", 0), layer.get("heads", 0), layer["bytes"], layer.get("state_tokens", 1)
            layers[spec, *kept].append(layer["layer"])
    groups = {"groups": answer["groups"]} if name in MIXED else {}
    return {"layers": [[*kept, _ranges(numbers)] for kept, numbers in layers.items()], **groups}


def _ranges(numbers: Iterable[int]) -> str:
    """Write numbers as "0-2,5"."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and runs[-1][1] == number - 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def layers_of(answer: dict[str, Any]) -> Iterator[tuple[int, tuple[Any, ...]]]:
    """Yield (layer, (spec, attention span, heads, bytes, tokens of an entry)) of an answer."""
    for *kept, ranges in answer["layers"]:
        for run in ranges.split(","):
            first, _, last = run.partition("-")
            for layer in range(int(first), int(last or first) + 1):
                yield layer, tuple(kept)


def _main() -> None:
    lines = [
        f"{json.dumps(_key(*asked))}: {json.dumps(answer)}" for asked, answer in build(QUESTIONS).items()
    ]
    RECORD.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    _main()
