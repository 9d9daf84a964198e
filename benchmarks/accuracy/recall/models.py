"""The architectures of the models that recall pairs, as small as engines on a CPU can run them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

_ATTENTION = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
_FOLDER = Path(__file__).with_name("checkpoints")


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """A model that recalls pairs.

    Attributes:
        name: name on the command line.
        config: name of the configuration class in transformers.
        settings: arguments of the configuration class, in addition to those that all models share.
        engine_reads: fields to add to config.json, because the engine needs them and transformers does not
            write them.
        reach: greatest number of pairs between the key that is asked for and the end of the prompt. The
            sliding window or the convolution must carry the key so far.
        looks_back: True if the first layer is attention, which must learn to look at the token before.
    """

    name: str
    config: str
    settings: Mapping[str, Any]
    engine_reads: Mapping[str, Any] = field(default_factory=dict)
    reach: int
    looks_back: bool = False

    @property
    def folder(self) -> Path:
        """Folder of the checkpoint and its questions."""
        return _FOLDER / self.name


_ALL = (
    Trained(
        name="gemma3",
        config="Gemma3TextConfig",
        settings={
            **_ATTENTION,
            "layer_types": ["sliding_attention", "full_attention"],
            "sliding_window": 64,
            "query_pre_attn_scalar": 32,
        },
        reach=28,
        looks_back=True,
    ),
    Trained(
        name="lfm2",
        config="Lfm2Config",
        settings={
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "layer_types": ["conv", "full_attention"],
            "block_auto_adjust_ff_dim": False,
        },
        engine_reads={"conv_dim": 64, "block_dim": 64, "block_ff_dim": 128},
        # The convolution sees three tokens.
        reach=0,
    ),
)
MODELS: Mapping[str, Trained] = MappingProxyType({one.name: one for one in _ALL})
