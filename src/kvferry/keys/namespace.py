"""What keys live in: everything that makes the bytes of another run wrong.

A chunk's key says which tokens; its namespace says of which model, in which form. Namespaces are compared
whole: content of another one is never looked at. The facts themselves are kept, not only their digest, so
that people can be told what differs.

The text is JSON of one form only: keys sorted, one space of indentation, ASCII, a line feed at the end.
Whole numbers, floats (the shortest decimal that reads back as the same float, always with a point or an
exponent), texts, true, false, null, lists and mappings; nothing that has two spellings. It is what is
digested and what is written beside the chunks: ``b2sum -l 128`` of that file is the digest.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, TypeAlias

from kvferry.errors import Unnameable
from kvferry.geometry.rank import GroupKind
from kvferry.geometry.store import Stored

Fact: TypeAlias = bool | int | float | str | Sequence["Fact"] | Mapping[str, "Fact"] | None

_DEEPEST = 32


@dataclass(frozen=True, slots=True)
class GroupFacts:
    """One KV cache group, as far as it decides what a chunk of it holds.

    Attributes:
        kind: what a continuation needs of it.
        reach: window in tokens for SLIDING, chunk in tokens for CHUNKED, 0 otherwise.
        content: id of the form its bytes are in. Canonical bytes are the same whoever wrote them; opaque ones
            name backend, ISA, block size and the rank's place as well.
        layers: name and fields of every layer of the model in this group, over all ranks.
    """

    kind: GroupKind
    reach: int
    content: str
    layers: tuple[tuple[str, tuple[Stored, ...]], ...]

    def facts(self) -> dict[str, Fact]:
        """The same as plain data."""
        layers = {name: [_field(field) for field in fields] for name, fields in self.layers}
        if len(layers) != len(self.layers):
            raise Unnameable(f"namespace: a group of kind {self.kind} names one layer twice")
        return {"content": self.content, "kind": self.kind.value, "layers": layers, "reach": self.reach}


def _field(field: Stored) -> dict[str, Fact]:
    return {
        "heads": field.heads,
        "inner": [[name, count] for name, count in field.inner],
        "item_bytes": field.item_bytes,
        "name": field.name,
    }


@dataclass(frozen=True, slots=True)
class Namespace:
    """A namespace, by its facts. Made by `of`, or by `read` from what `text` was written to.

    Attributes:
        text: the facts, in the one form described above.
    """

    text: str

    def __post_init__(self) -> None:
        try:
            facts = json.loads(self.text)
        except (ValueError, RecursionError) as error:
            raise Unnameable(f"namespace: what was read is no JSON ({error})") from error
        if not isinstance(facts, dict) or _canonical(facts) != self.text:
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
        groups: Sequence[GroupFacts],
        chunk_tokens: int,
        format_version: int,
    ) -> Namespace:
        """The namespace of an engine.

        Args:
            weights: digest of the weights' content.
            model: the model's own configuration with overrides applied: rope, windows, heads, ...
            dtype: what is computed in.
            kv_dtype: element type of the cache.
            scales: of quantised KV, by name; those that were computed at run time differ from run to run.
            groups: in the order in which chunks name them.
            chunk_tokens: tokens of a chunk.
            format_version: of the canonical form.

        Raises:
            Unnameable: a fact has no exact text. The message says which, and what to give instead.
        """
        facts: dict[str, Fact] = {
            "chunk_tokens": chunk_tokens,
            "dtype": dtype,
            "format_version": format_version,
            "groups": [group.facts() for group in groups],
            "kv_dtype": kv_dtype,
            "model": model,
            "scales": scales,
            "weights": weights,
        }
        if missing := [name for name in ("weights", "dtype", "kv_dtype", "groups") if not facts[name]]:
            raise Unnameable(f"namespace: {missing[0]} is empty, so chunks of anything would be taken")
        return cls(_canonical(facts))

    @property
    def facts(self) -> dict[str, Any]:
        """The facts as plain data, the caller's own copy."""
        found: dict[str, Any] = json.loads(self.text)
        return found

    @property
    def digest(self) -> str:
        """32 hex digits (BLAKE2b, 128 bits) of the text: nobody but the operator chooses facts."""
        return blake2b(self.text.encode("ascii"), digest_size=16).hexdigest()


def differences(a: Namespace, b: Namespace) -> tuple[str, ...]:
    r"""What tells two namespaces apart, a sentence each, in the order of the facts' names.

    >>> a = Namespace('{\n "reach": 64\n}\n')
    >>> b = Namespace('{\n "kind": "mla",\n "reach": 128\n}\n')
    >>> differences(a, b)
    ('kind: the first has none, the second has "mla"', 'reach: the first has 64, the second has 128')
    """
    return tuple(_differences("", a.facts, b.facts))


def _differences(where: str, a: Any, b: Any) -> Iterator[str]:
    if isinstance(a, dict) and isinstance(b, dict):
        for name in sorted(a.keys() | b.keys()):
            yield from _differences(
                f"{where}.{name}" if where else name, a.get(name, _NONE), b.get(name, _NONE)
            )
    elif isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
        for at, (one, other) in enumerate(zip(a, b, strict=True)):
            yield from _differences(f"{where}[{at}]", one, other)
    elif (one := _said(a)) != (other := _said(b)):
        if len(one) + len(other) > _LONGEST:
            one, other = _kind(a), _kind(b)
        yield f"{where}: the first has {one}, the second has {other}"


_NONE = object()
"""In place of what is not there; null is there."""

_LONGEST = 400


def _said(value: Any) -> str:
    return "none" if value is _NONE else json.dumps(value, sort_keys=True)


def _kind(value: Any) -> str:
    """A value that is too long to be said."""
    if isinstance(value, list):
        return f"a list of {len(value)}"
    return f"{len(value)} facts" if isinstance(value, dict) else f"{_said(value)[:100]}"


def _canonical(facts: Mapping[str, Fact]) -> str:
    plain = _plain("", facts, 0)
    return json.dumps(plain, sort_keys=True, indent=1, separators=(",", ": "), allow_nan=False) + "\n"


def _plain(where: str, value: Any, depth: int) -> Any:
    """The same in exact types: a subclass may read as one thing and mean another (True == 1, IntEnum)."""
    if depth > _DEEPEST:
        raise Unnameable(f"namespace: {where[:60]}... is nested deeper than {_DEEPEST}")
    kind = type(value)
    if value is None or kind is bool:
        return value
    if kind is str:
        return _encodable(where, value)
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
            _name(where, key): _plain(f"{where}.{key}" if where else key, each, depth + 1)
            for key, each in value.items()
        }
    if kind in (list, tuple):
        return [_plain(f"{where}[{at}]", each, depth + 1) for at, each in enumerate(value)]
    raise Unnameable(
        f"namespace: {where} is a {kind.__module__}.{kind.__qualname__}, which has no exact text; "
        "give a text, a number, true, false, null, a list or a mapping"
    )


def _name(where: str, key: Any) -> str:
    if type(key) is not str:
        raise Unnameable(f"namespace: {where} has the key {key!r}, which is no text; 1 and '1' would be one")
    return _encodable(f"{where}.{key!a}", key)


def _encodable(where: str, text: str) -> str:
    """Two surrogates and the character that they spell in UTF-16 would have one JSON text."""
    if any("\ud800" <= character <= "\udfff" for character in text):
        raise Unnameable(f"namespace: {where} has half a character (a surrogate) in it; give whole ones")
    return text
