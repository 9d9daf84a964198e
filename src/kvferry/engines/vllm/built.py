"""Facts about the model that a worker has built: everything that decides KV content, except the weights.

Some settings have an effect only while vLLM builds the model: `max_model_len` chooses the factors of
LongRoPE, and changes the configuration of Llama 4. So every rank reads these facts from the model that it has
built:

- the configuration as the model left it, by key;
- plain attributes of rotary embeddings (base, factors, the table in use);
- float attributes of the modules that the model's own code defines (scalings, epsilons);
- scalar buffers (normalisers), and a few early rows of rotary tables.

They do not depend on the number of ranks, on the block size or on `max_model_len` alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

from kvferry.engines.vllm.compat.model import SHARED_LAYERS, built_models
from kvferry.keys.namespace import settings_of, text_of

_POSITIONS = (1, 2, 63)
"""Compared rows of a rotary table. Row 0 says little, and early rows have the smallest rounding errors."""

_NOT_CONTENT = frozenset(
    {
        "training",
        "max_position_embeddings",  # length of the table; the table shows factors that follow from it
        "cache_max_position_num",
        "use_flashinfer",  # kernels
        "use_aiter",
        "enable_fp32_compute",
    }
)
_ROTARY = re.compile("rotary|rope", re.IGNORECASE)
_SCALARS = (bool, int, float, str)


@dataclass(frozen=True, slots=True)
class Built:
    """Properties of the built model, on one rank or on several ranks together.

    Attributes:
        config: values of each key of the model's configuration, as texts; several if ranks differ.
        modules: values of each attribute or buffer (such as ``RotaryEmbedding.base``), as texts; several if
            modules of the same class differ. The entry ``class`` is the name of the model's class.
    """

    config: Mapping[str, frozenset[str]] = field(default_factory=dict)
    modules: Mapping[str, frozenset[str]] = field(default_factory=dict)

    def with_other(self, other: Built) -> Built:
        # Pipeline stages hold different modules, so both may have values for the same name.
        return Built(_joined(self.config, other.config), _joined(self.modules, other.modules))

    def facts(self) -> dict[str, str | dict[str, str]]:
        """Return a text for each property of the modules, and a dictionary of texts for the configuration."""
        config = {"model configuration": _as_texts(self.config)} if self.config else {}
        return {**config, **{f"built model, {name}": text for name, text in _as_texts(self.modules).items()}}


def built_of(vllm_config: Any) -> Built:
    """Collect the properties of this worker's target model, without a draft model, that may affect its KV."""
    model = built_models(vllm_config).target
    settings = settings_of(vllm_config.model_config.hf_config.to_dict())
    modules: dict[str, set[str]] = {"class": {type(model).__name__}}
    for name, text in _content_facts(model):
        modules.setdefault(name, set()).add(text)
    return Built(
        {key: frozenset((text,)) for key, text in settings.items()},
        {name: frozenset(texts) for name, texts in modules.items()},
    )


def _content_facts(model: Any) -> Iterator[tuple[str, str]]:
    """Yield (name, value as text) of each attribute and buffer that affects the KV."""
    seen = set[int]()
    for module in model.modules():
        if id(module) in seen:
            continue
        seen.add(id(module))
        kind = type(module)
        rotary = _ROTARY.search(kind.__name__) is not None
        # Attributes of shared layers depend on the rank or choose kernels. Those that matter for KV are also
        # in the configuration or in the geometry.
        if rotary or not kind.__module__.startswith(SHARED_LAYERS):
            yield from _attributes(kind.__name__, vars(module), rotary=rotary)
        for name, buffer in module.named_buffers(recurse=False):
            yield from _buffer(f"{kind.__name__}.{name}", buffer, rotary=rotary)


def _attributes(owner: str, attributes: Mapping[str, Any], *, rotary: bool) -> Iterator[tuple[str, str]]:
    for name, value in attributes.items():
        if name.startswith("_") or name in _NOT_CONTENT:
            continue
        # Integers and flags of other modules may be a rank's number of heads, or choose kernels.
        if type(value) is float or (rotary and _is_plain(value)):
            yield f"{owner}.{name}", text_of(value)


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return bool(value) and all(type(each) in _SCALARS for each in value)
    return type(value) in _SCALARS


def _buffer(name: str, buffer: Any, *, rotary: bool) -> Iterator[tuple[str, str]]:
    if not buffer.is_floating_point() or buffer.is_meta:
        return
    if buffer.ndim == 0 and not name.rpartition(".")[2].startswith("_"):
        yield name, _rounded(buffer.float().item())
    if rotary and buffer.ndim >= 2 and buffer.shape[0] > max(_POSITIONS):
        rows = buffer[list(_POSITIONS)].float().cpu()
        # Devices differ in the last bits. The attributes from which tables are computed are compared exactly.
        texts = [_rounded(value) for value in rows.flatten().tolist()]
        digest = blake2b(" ".join(texts).encode(), digest_size=8).hexdigest()
        width = "x".join(map(str, buffer.shape[1:]))
        yield f"{name} of {width}", f"{' '.join(texts[:4])}... ({digest})"


def _rounded(value: float) -> str:
    # Sines and cosines near 0 differ in their last digits between devices.
    text = f"{value:.3f}" if abs(value) < 10 else f"{value:.5g}"
    # A tiny negative number rounds to another text than a tiny positive one.
    return "0.000" if text == "-0.000" else text


def _joined(a: Mapping[str, frozenset[str]], b: Mapping[str, frozenset[str]]) -> dict[str, frozenset[str]]:
    return {name: a.get(name, frozenset()) | b.get(name, frozenset()) for name in sorted(a.keys() | b.keys())}


def _as_texts(values: Mapping[str, Iterable[str]]) -> dict[str, str]:
    return {name: text_of(" | ".join(sorted(texts))) for name, texts in values.items()}
