"""Settings as flat text of limited size, so that engines can compare them and report the differences."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from enum import Enum
from hashlib import blake2b
from typing import Any

# Keys in the configuration of a model or processor that do not affect the content of its KV cache.
NOT_CONTENT = frozenset(
    {
        # names and versions
        "_name_or_path", "name_or_path", "_commit_hash", "transformers_version", "architectures", "auto_map",
        "model_type_vllm", "torchscript", "_attn_implementation", "_attn_implementation_internal",
        "_attn_implementation_autoset", "_experts_implementation", "_experts_implementation_internal",
        # compared separately, with their resolved values
        "dtype", "torch_dtype",
        # the longest prompt: its effects are visible in the built model
        "max_model_len",
        # sampling and other treatment of the output
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
        # draft models: number of speculated tokens
        "num_lookahead_tokens", "n_predict",
    }
)  # fmt: skip

# Further settings are combined into a digest.
MAX_SETTINGS = 4096
# Characters of a key or value; a longer one is its beginning (`_HEAD`) and a digest.
_LONGEST = 120
_HEAD = 72
# Maximum nesting depth of objects, because an object may contain itself.
_DEEPEST = 6


def settings_of(config: Mapping[str, Any]) -> dict[str, str]:
    """Flatten a nested configuration to a mapping from dotted key to text.

    Keys in `NOT_CONTENT` are left out, and null settings, so that a null setting equals an absent one.

    >>> settings_of({"rope": {"theta": 1e4, "factor": None}, "layers": [1, 2], "use_cache": True})
    {'layers': '[1, 2]', 'rope.theta': '10000'}

    A model's own code may put objects into its configuration. Such objects are represented by their
    attributes, because Python prints an object differently in every process. The members of a set are sorted
    as text, in which 10 precedes 2.

    >>> from types import SimpleNamespace
    >>> settings_of({"blocks": [SimpleNamespace(heads={2, 10})], "first": SimpleNamespace(heads=2)})
    {'blocks': '[{"heads": [10, 2]}]', 'first.heads': '2'}
    """
    found = dict(sorted(_flatten("", _to_json_types(config))))
    if len(found) <= MAX_SETTINGS:
        return found
    names = list(found)
    rest = json.dumps([(name, found.pop(name)) for name in names[MAX_SETTINGS:]])
    return {**found, f"{len(names) - MAX_SETTINGS} more": _digest(rest)}


def text_of(value: Any) -> str:
    """Return the value of a setting as text. A long text is shortened to its beginning and a digest.

    An integer and a float of equal value, such as 1 and 1.0, have the same text.
    """
    text = value if isinstance(value, str) else json.dumps(_to_json_types(value), sort_keys=True)
    return text if len(text) <= _LONGEST else f"{text[:_HEAD]}... ({_digest(text)})"


def _flatten(where: str, config: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield (dotted key, text) of each setting in a nested configuration at a dotted key."""
    for key, value in config.items():
        if str(key) in NOT_CONTENT or value is None:
            continue
        name = f"{where}.{key}" if where else str(key)
        if isinstance(value, Mapping):
            yield from _flatten(name, value)
        else:
            yield text_of(name), text_of(value)


def _to_json_types(value: Any, depth: int = 0) -> Any:
    """Convert a value to JSON types, in the same way in every process; to text beyond `_DEEPEST`."""
    members = _members(value) if depth <= _DEEPEST else None
    if isinstance(members, Mapping):
        return {str(key): _to_json_types(each, depth + 1) for key, each in members.items()}
    if members is not None:
        return [_to_json_types(each, depth + 1) for each in members]
    return _to_scalar(value)


def _members(value: Any) -> Mapping[Any, Any] | list[Any] | None:
    """Return the members of a collection, or the attributes of an object; None for any other value."""
    if isinstance(value, Mapping):
        return value
    if isinstance(value, list | tuple):
        return list(value)
    if isinstance(value, set | frozenset):  # the order of a set differs between processes
        return sorted(value, key=str)
    has_name = isinstance(value, type | Enum) or callable(value)
    return None if has_name else getattr(value, "__dict__", None)


def _to_scalar(value: Any) -> bool | int | float | str | None:
    # JSON files write 10000 and 1e4 for one setting. Beyond 2^53 a float stands for several integers.
    if isinstance(value, float) and value.is_integer() and abs(value) < 1 << 53:
        return int(value)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if callable(value) or repr(value) == object.__repr__(value):  # its text would contain its address
        return str(getattr(value, "__qualname__", type(value).__qualname__))
    return str(value)


def _digest(text: str) -> str:
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()
