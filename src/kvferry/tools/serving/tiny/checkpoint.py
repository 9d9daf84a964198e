"""Write the tiny checkpoint of a model family. Its random weights are the same every time."""

from __future__ import annotations

import json
import shutil
from importlib.metadata import version
from pathlib import Path
from typing import Any

from kvferry.common.files import user_cache
from kvferry.tools.serving.tiny.families import Family, family
from kvferry.tools.serving.tiny.tokenizer import SPECIAL_IDS, VOCABULARY, digest, publish, trained_tokenizer

_SEED = 20_260_101
_SHARED: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "max_position_embeddings": 4096,
    **SPECIAL_IDS,
}
# Decay rates and convolutions are only stable near the architecture's own initial values, so they keep these.
_AS_THE_ARCHITECTURE_DRAWS_THEM = ("A_log", "conv")


def cache_directory() -> Path:
    """Return the cache folder of tiny checkpoints. Raise ConfigError if the user has no cache folder."""
    return user_cache() / "tiny"


def tiny_checkpoint(name: str, directory: Path) -> Path:
    """Return the folder with the tiny checkpoint of a model family. It is written if it does not exist.

    Several callers may call this at the same time. Raise ConfigError for an unknown family.
    """
    chosen = family(name)
    tokenizer = trained_tokenizer(directory)
    # Everything that determines the content is in the folder's name, so an old one is never taken for a new.
    weights = (chosen.config, chosen.settings, chosen.engine_reads, chosen.scale, chosen.embedding_scale)
    recipe = digest(weights, _SHARED, _SEED, tokenizer.resolve().name, version("transformers"))
    return publish(directory, f"{name}-{recipe}", lambda folder: _write(chosen, tokenizer, folder))


def _write(chosen: Family, tokenizer: Path, folder: Path) -> None:
    # Save bfloat16: its values are exact in float32, in which some engines compute, and take half the space.
    import torch
    from transformers.utils import logging

    logging.disable_progress_bar()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(_SEED)
        model = _random_model(chosen)
    model.to(torch.bfloat16).save_pretrained(folder)
    if chosen.engine_reads:
        path = folder / "config.json"
        config = json.loads(path.read_text())
        path.write_text(json.dumps({**config, **chosen.engine_reads}, indent=2, sort_keys=True))
    for file in tokenizer.iterdir():
        shutil.copy(file, folder)


def _random_model(chosen: Family) -> Any:
    import torch
    import transformers

    config_class = getattr(transformers, chosen.config)
    config = config_class(**{**_SHARED, "initializer_range": chosen.scale, **chosen.settings})
    model: Any = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim < 2 or any(part in name for part in _AS_THE_ARCHITECTURE_DRAWS_THEM):
                continue
            weight.normal_(0.0, chosen.embedding_scale if "embed" in name else chosen.scale)
    return model
