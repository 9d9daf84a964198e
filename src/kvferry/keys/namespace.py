"""The namespace of keys: all facts that must be equal before one engine may use another's chunks.

A chunk's key identifies its tokens. Its namespace identifies the model and the format of the bytes. Engines
compare namespaces as a whole, and never read the chunks of another namespace. A namespace keeps its facts in
addition to their digest, so that kvferry can tell an operator which facts differ.

The text of the facts is canonical JSON: sorted keys, one space of indentation, ASCII, a line feed at the end.
It may contain whole numbers, floats, texts, true, false, null, lists and mappings. A float is written as the
shortest decimal that reads back as the same float, always with a point or an exponent. The digest is over
this text.

A *note* is a small file that a tier keeps beside the chunks of a namespace. It is JSON of the same form, with
the facts under "facts" and the model's display name under "name". Different weights with the same name have
different namespaces. The same weights with another name have the same namespace.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from hashlib import blake2b
from typing import Any, TypeAlias

from kvferry.common.errors import Unnameable

Fact: TypeAlias = bool | int | float | str | Sequence["Fact"] | Mapping[str, "Fact"] | None

_DEEPEST = 32

# An absent fact, as distinct from null.
_NONE = object()
# Maximum length of the two values in a message; longer values are only described.
_LONGEST = 400


@dataclass(frozen=True, slots=True)
class Namespace:
    """The scope of chunk keys: all facts about model and format that determine the bytes of chunks."""

    text: str  # facts as canonical JSON
    # Display name of the model. Comparison and digest ignore it.
    name: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        # One text per set of facts, because the digest is over the text.
        if _canonical(_parse(self.text)) != self.text:
            raise Unnameable("namespace: what was read is not in the form in which namespaces are written")

    @classmethod
    def of(
        cls,
        *,
        weights: str,
        model: Mapping[str, Fact],
        dtype: str,
        kv_dtype: str,
        scales: Mapping[str, float],
        form: Sequence[str],
        name: str,
    ) -> Namespace:
        """Create the namespace of an engine. Raise Unnameable if a fact is empty, or does not fit into JSON.

        Args:
            weights: digest of the content of the weights.
            model: other properties of the model and of the engine's settings that affect KV, by name.
            scales: scales of a quantised KV cache, by name; empty if there are none or if `form` has them.
                Scales that an engine computes at run time give another namespace in each run.
            form: lines of text that describe the format of a chunk's bytes, from `CanonicalForm.describe`.
        """
        facts: dict[str, Fact] = {
            "dtype": dtype,
            "form": form,
            "kv_dtype": kv_dtype,
            "model": model,
            "scales": scales,
            "weights": weights,
        }
        if missing := [fact for fact in ("weights", "dtype", "kv_dtype", "form") if not facts[fact]]:
            raise Unnameable(f"namespace: {missing[0]} is empty, so chunks of anything would be taken")
        return cls(_canonical(facts), name)

    @classmethod
    def read(cls, note: str) -> Namespace:
        """Return the namespace that a note describes. Compare its digest: the note may have been changed."""
        found = _parse(note)
        facts, name = found.get("facts"), found.get("name")
        if not isinstance(facts, dict) or not isinstance(name, str):
            raise Unnameable("namespace: what was read is no note; expected facts and a name")
        return cls(_canonical(facts), name)

    @property
    def note(self) -> str:
        return _to_json({"facts": self.facts, "name": self.name})

    @property
    def facts(self) -> dict[str, Any]:
        """Facts as a new dict of JSON types."""
        found: dict[str, Any] = json.loads(self.text)
        return found

    @property
    def digest(self) -> bytes:
        """BLAKE2b digest of `text`, 32 bytes."""
        return blake2b(self.text.encode("ascii"), digest_size=32).digest()


def differences(a: Namespace, b: Namespace) -> tuple[str, ...]:
    r"""Return one sentence for each fact in which two namespaces differ, sorted by the name of the fact.

    >>> a = Namespace('{\n "window": 64\n}\n')
    >>> b = Namespace('{\n "kind": "mla",\n "window": 128\n}\n')
    >>> differences(a, b)
    ('kind: the first has none, the second has "mla"', 'window: the first has 64, the second has 128')
    """
    return tuple(_iter_differences("", a.facts, b.facts))


def _iter_differences(where: str, a: Any, b: Any) -> Iterator[str]:
    """Yield one sentence for each difference between two values of a fact at a dotted path."""
    if isinstance(a, dict) and isinstance(b, dict):
        for name in sorted(a.keys() | b.keys()):
            yield from _iter_differences(
                f"{where}.{name}" if where else name, a.get(name, _NONE), b.get(name, _NONE)
            )
    elif isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
        for at, (one, other) in enumerate(zip(a, b, strict=True)):
            yield from _iter_differences(f"{where}[{at}]", one, other)
    elif (one := _as_text(a)) != (other := _as_text(b)):
        if len(one) + len(other) > _LONGEST:
            one, other = _summary(a), _summary(b)
        yield f"{where}: the first has {one}, the second has {other}"


def _as_text(value: Any) -> str:
    return "none" if value is _NONE else json.dumps(value, sort_keys=True)


def _summary(value: Any) -> str:
    """Return the size or the beginning of a value that is too long for a message."""
    if isinstance(value, list):
        return f"a list of {len(value)}"
    return f"{len(value)} facts" if isinstance(value, dict) else _as_text(value)[:100]


def _parse(text: str) -> dict[str, Any]:
    """Parse the text of a JSON object, or raise Unnameable."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise Unnameable(f"namespace: what was read is no JSON ({error})") from error
    if not isinstance(found, dict):
        raise Unnameable("namespace: what was read is no mapping of facts")
    return found


def _canonical(facts: Mapping[str, Fact]) -> str:
    """Return facts as canonical JSON, or raise Unnameable."""
    return _to_json(_to_builtin("", facts, 0))


def _to_json(plain: Any) -> str:
    return json.dumps(plain, sort_keys=True, indent=1, separators=(",", ": "), allow_nan=False) + "\n"


def _to_builtin(where: str, value: Any, depth: int) -> Any:
    """Return a fact at a dotted path as built-in types that JSON can hold exactly, or raise Unnameable."""
    if depth > _DEEPEST:
        raise Unnameable(f"namespace: {where[:60]}... is nested deeper than {_DEEPEST}")
    # The exact type: an instance of a subclass may equal a built-in value but mean something else.
    kind = type(value)
    if value is None or kind is bool:
        return value
    if kind is str:
        return _check_encodable(where, value)
    if kind is int:
        if not -(1 << 63) <= value < 1 << 64:
            raise Unnameable(f"namespace: {where} is a number of more than 64 bits; give it as text")
        return value
    if kind is float:
        if not math.isfinite(value):
            raise Unnameable(f"namespace: {where} is {value}, which no JSON can say; give it as text")
        return value
    if isinstance(value, Mapping):
        return {
            _check_key(where, key): _to_builtin(f"{where}.{key}" if where else key, each, depth + 1)
            for key, each in value.items()
        }
    if kind in (list, tuple):
        return [_to_builtin(f"{where}[{at}]", each, depth + 1) for at, each in enumerate(value)]
    raise Unnameable(
        f"namespace: {where} is a {kind.__module__}.{kind.__qualname__}, which has no exact text; "
        "give a text, a number, true, false, null, a list or a mapping"
    )


def _check_key(where: str, key: Any) -> str:
    if type(key) is not str:
        raise Unnameable(f"namespace: {where} has the key {key!r}, which is no text; 1 and '1' would be one")
    return _check_encodable(f"{where}.{key!a}", key)


def _check_encodable(where: str, text: str) -> str:
    # A pair of surrogates has the same JSON as the character that it encodes: two texts with one digest.
    if any("\ud800" <= character <= "\udfff" for character in text):
        raise Unnameable(f"namespace: {where} has half a character (a surrogate) in it; give whole ones")
    return text


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
_LONGEST_VALUE = 120
_HEAD = 72
# Maximum nesting depth of objects, because an object may contain itself.
_DEEPEST_VALUE = 6


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
    return text if len(text) <= _LONGEST_VALUE else f"{text[:_HEAD]}... ({_digest(text)})"


def _flatten(where: str, config: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for key, value in config.items():
        if str(key) in NOT_CONTENT or value is None:
            continue
        name = f"{where}.{key}" if where else str(key)
        if isinstance(value, Mapping):
            yield from _flatten(name, value)
        else:
            yield text_of(name), text_of(value)


def _to_json_types(value: Any, depth: int = 0) -> Any:
    """Convert a value to JSON types, in the same way in every process; to text beyond `_DEEPEST_VALUE`."""
    members = _members(value) if depth <= _DEEPEST_VALUE else None
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
