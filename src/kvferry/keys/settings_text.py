"""Settings as flat, bounded text, by which engines compare them and report differences."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from enum import Enum
from hashlib import blake2b
from typing import Any

NOT_CONTENT = frozenset(
    {
        # names and versions
        "_name_or_path", "name_or_path", "_commit_hash", "transformers_version", "architectures", "auto_map",
        "model_type_vllm", "torchscript", "_attn_implementation", "_attn_implementation_internal",
        "_attn_implementation_autoset", "_experts_implementation", "_experts_implementation_internal",
        # compared by themselves, as they were resolved
        "dtype", "torch_dtype",
        # how long a prompt may be: what follows from it is in the built model
        "max_model_len",
        # what is done with the answer
        "bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "decoder_start_token_id",
        "forced_bos_token_id", "forced_eos_token_id", "tie_word_embeddings", "tie_encoder_decoder",
        "id2label", "label2id", "num_labels", "problem_type", "task_specific_params", "finetuning_task",
        "use_cache", "return_dict", "output_attentions", "output_hidden_states", "chunk_size_feed_forward",
        "temperature", "top_k", "top_p", "typical_p", "repetition_penalty", "length_penalty", "do_sample",
        "num_beams", "num_beam_groups", "diversity_penalty", "early_stopping", "max_length", "min_length",
        "max_new_tokens", "no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "bad_words_ids",
        "num_return_sequences", "output_scores", "return_dict_in_generate", "remove_invalid_values",
        "exponential_decay_length_penalty", "suppress_tokens", "begin_suppress_tokens", "prefix",
        # training
        "initializer_range", "use_bfloat16", "tf_legacy_loss", "pruned_heads", "gradient_checkpointing",
        # of drafts: how far they look ahead, for how long prompts
        "num_lookahead_tokens", "n_predict",
    }
)  # fmt: skip
"""Keys of a model's or processor's configuration that do not decide what its KV cache holds."""

MOST = 4096
_LONGEST = 120
_HEAD = 72
_DEEPEST = 6
"""Maximum nesting of objects, because an object may contain itself."""


def settings_of(config: Mapping[str, Any]) -> dict[str, str]:
    """Flatten a nested configuration to settings by dotted key, without those that do not decide content.

    Null settings are left out: versions of a library differ in the defaults that they write.

    >>> settings_of({"rope": {"theta": 1e4, "factor": None}, "layers": [1, 2], "use_cache": True})
    {'layers': '[1, 2]', 'rope.theta': '10000'}

    A model's own code may keep objects. They are read by their attributes: Python prints an object
    differently in every process.

    >>> from types import SimpleNamespace
    >>> settings_of({"blocks": [SimpleNamespace(heads={2, 10})], "first": SimpleNamespace(heads=2)})
    {'blocks': '[{"heads": [10, 2]}]', 'first.heads': '2'}
    """
    found = dict(sorted(_flat("", _plain(config))))
    if len(found) <= MOST:
        return found
    names = list(found)
    rest = json.dumps([(name, found.pop(name)) for name in names[MOST:]])
    return {**found, f"{len(names) - MOST} more": _digest(rest)}


def text_of(value: Any) -> str:
    """Return a value as text; a long value as its beginning and a digest.

    Whole numbers have one spelling, with a point or without.
    """
    text = value if isinstance(value, str) else json.dumps(_plain(value), sort_keys=True)
    return text if len(text) <= _LONGEST else f"{text[:_HEAD]}... ({_digest(text)})"


def _flat(where: str, config: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for key, value in config.items():
        if str(key) in NOT_CONTENT or value is None:
            continue
        name = f"{where}.{key}" if where else str(key)
        if isinstance(value, Mapping):
            yield from _flat(name, value)
        else:
            yield text_of(name), text_of(value)


def _plain(value: Any, depth: int = 0) -> Any:
    """Return a value as JSON types, the same in every process."""
    parts = _parts(value) if depth <= _DEEPEST else None
    if isinstance(parts, Mapping):
        return {str(key): _plain(each, depth + 1) for key, each in parts.items()}
    if parts is not None:
        return [_plain(each, depth + 1) for each in parts]
    return _single(value)


def _parts(value: Any) -> Mapping[Any, Any] | list[Any] | None:
    """Return the contents of a collection or an object; None for anything else."""
    if isinstance(value, Mapping):
        return value
    if isinstance(value, list | tuple):
        return list(value)
    if isinstance(value, set | frozenset):  # each process keeps one in an order of its own
        return sorted(value, key=str)
    named = isinstance(value, type | Enum) or callable(value)
    return None if named else getattr(value, "__dict__", None)


def _single(value: Any) -> bool | int | float | str | None:
    if isinstance(value, float) and value.is_integer() and abs(value) < 1 << 53:
        return int(value)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if callable(value) or repr(value) == object.__repr__(value):  # printed by its address
        return str(getattr(value, "__qualname__", type(value).__qualname__))
    return str(value)


def _digest(text: str) -> str:
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()
