"""The namespace of keys: all facts that must be equal for one engine to use another's chunks.

A chunk's key identifies its tokens. Its namespace identifies the model and the form of the bytes. Engines
compare namespaces as a whole, and never read the content of another namespace. A namespace keeps the facts
besides their digest, so that kvferry can tell people which facts differ.

The text of the facts is JSON with only one spelling: sorted keys, one space of indentation, ASCII, a line
feed at the end. It has whole numbers, floats (the shortest decimal that reads back as the same float, always
with a point or an exponent), texts, true, false, null, lists and mappings. The digest is over this text.

The *note* beside the chunks is JSON of the same form, with the facts under "facts" and the model's display
name under "name". Different weights with the same name have different namespaces. The same weights with
another name have the same namespace.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, TypeAlias

from kvferry.errors import Unnameable

Fact: TypeAlias = bool | int | float | str | Sequence["Fact"] | Mapping[str, "Fact"] | None

_DEEPEST = 32


@dataclass(frozen=True, slots=True)
class Namespace:
    """A namespace with its facts. `of` makes it from facts, `read` from a note.

    Attributes:
        text: the facts, in the JSON form of this module.
        name: display name of the model. Neither comparison nor digest includes it.
    """

    text: str
    name: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        if _canonical(_parsed(self.text)) != self.text:
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
        """Return the namespace of an engine.

        Args:
            weights: digest of the weights' content.
            model: the model's own configuration with overrides applied: rope, windows, heads, ...
            dtype: element type of the computation.
            kv_dtype: element type of the cache.
            scales: scales of quantised KV, by name. Scales computed at run time differ from run to run.
            form: the form of a chunk's bytes, as the lines of `CanonicalForm.describe`.
            name: display name of the model.

        Raises:
            Unnameable: a fact has no exact text. The message names the fact, and what to give instead.
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
        """Return the namespace of a note. Its digest tells whether it is the expected one.

        Raises:
            Unnameable: the text is not a note.
        """
        found = _parsed(note)
        facts, name = found.get("facts"), found.get("name")
        if not isinstance(facts, dict) or not isinstance(name, str):
            raise Unnameable("namespace: what was read is no note; expected facts and a name")
        return cls(_canonical(facts), name)

    @property
    def note(self) -> str:
        """Text of the note beside the chunks: facts and name."""
        return _dumped({"facts": self.facts, "name": self.name})

    @property
    def facts(self) -> dict[str, Any]:
        """Copy of the facts as plain data."""
        found: dict[str, Any] = json.loads(self.text)
        return found

    @property
    def digest(self) -> bytes:
        """BLAKE2b digest of the text, 32 bytes, as by ``b2sum -l 256``."""
        return blake2b(self.text.encode("ascii"), digest_size=32).digest()


def differences(a: Namespace, b: Namespace) -> tuple[str, ...]:
    r"""Return the differences of two namespaces, a sentence each, in the order of the facts' names.

    >>> a = Namespace('{\n "window": 64\n}\n')
    >>> b = Namespace('{\n "kind": "mla",\n "window": 128\n}\n')
    >>> differences(a, b)
    ('kind: the first has none, the second has "mla"', 'window: the first has 64, the second has 128')
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
"""Marks an absent value, as distinct from null."""

_LONGEST = 400


def _said(value: Any) -> str:
    return "none" if value is _NONE else json.dumps(value, sort_keys=True)


def _kind(value: Any) -> str:
    """Return a short description of a value that is too long for a message."""
    if isinstance(value, list):
        return f"a list of {len(value)}"
    return f"{len(value)} facts" if isinstance(value, dict) else f"{_said(value)[:100]}"


def _parsed(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise Unnameable(f"namespace: what was read is no JSON ({error})") from error
    if not isinstance(found, dict):
        raise Unnameable("namespace: what was read is no mapping of facts")
    return found


def _canonical(facts: Mapping[str, Fact]) -> str:
    return _dumped(_plain("", facts, 0))


def _dumped(plain: Any) -> str:
    return json.dumps(plain, sort_keys=True, indent=1, separators=(",", ": "), allow_nan=False) + "\n"


def _plain(where: str, value: Any, depth: int) -> Any:
    """Return a value in built-in types.

    An instance of a subclass can compare equal and mean something else.
    """
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
    """Refuse surrogates: a pair of them has the same JSON text as the character that it encodes."""
    if any("\ud800" <= character <= "\udfff" for character in text):
        raise Unnameable(f"namespace: {where} has half a character (a surrogate) in it; give whole ones")
    return text
