"""Odd messages, made of valid ones and a seed: the same seed makes the same messages."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import msgspec

_EXTREMES = (0, -1, 1, 2**15, 2**31 - 1, 2**31, 2**32, 2**53, 2**62, 2**63 - 1, -(2**63), 2**64 - 1)
_TEXTS = (
    "",
    "\0",
    "\x1b[2J",
    "a b",
    "../" * 9,
    "\u202e",
    "x" * 300,
    "y" * 5000,
    "z" * 100_000,
    "%s%n",
    "nan",
)


MOST_BYTES = 6 << 20
"""Of a message: more than a producer takes. Nobody reads what is larger, so it costs the fuzzer alone."""


class Odd:
    """Draws messages that nobody should send."""

    def __init__(self, seed: int, messages: list[bytes]) -> None:
        """Args: seed: of all draws; messages: valid ones, of both directions."""
        self.draw = random.Random(seed)
        self._messages = messages
        self._said: list[bytes] = []
        self._repeated = False

    def message(self) -> bytes:
        """Return a message: mostly one with a few values replaced."""
        kind = self.draw.random()
        if kind < 0.55:
            found = self._spoiled()
        elif kind < 0.65:
            found = self._garbled()
        elif kind < 0.67:
            found = self.draw.choice((b"\x91", b"\x81\xa4type")) * 100_000  # nested deeper than a stack
        elif kind < 0.70:
            found = self.draw.randbytes(self.draw.choice((0, 1, 7, 100, 5000)))
        elif kind < 0.95 or not self._said:
            found = self.draw.choice(self._messages)
        else:
            found = self.draw.choice(self._said)  # a replay
        if len(found) < 10_000:
            self._said = [*self._said[-50:], found]
        return found

    def frames(self) -> list[bytes]:
        """Return the frames of a message: nearly always one."""
        return [self.message() for _ in range(1 if self.draw.random() < 0.97 else self.draw.randrange(2, 6))]

    def _spoiled(self) -> bytes:
        message = msgspec.msgpack.decode(self.draw.choice(self._messages))
        self._repeated = False
        for _ in range(self.draw.choice((1, 1, 1, 2, 3))):
            places = list(_places(message))
            if places:
                inside, key = self.draw.choice(places)
                self._change(inside, key)
        return msgspec.msgpack.encode(message)

    def _change(self, inside: Any, key: Any) -> None:
        """Change one value in place: replaced, removed, repeated, made larger."""
        value, kind = inside[key], self.draw.random()
        if kind < 0.08:
            del inside[key]
        elif kind < 0.14 and isinstance(inside, dict):
            inside[self.draw.choice(_TEXTS)] = value
        elif kind < 0.24 and isinstance(value, list):
            times = self.draw.choice((0, 2, 3) if self._repeated else (0, 2, 300, 5000))
            times = min(times, MOST_BYTES // (2 * len(msgspec.msgpack.encode(value))))
            inside[key], self._repeated = value * times, self._repeated or times > 3
        elif kind < 0.34 and isinstance(value, list):
            inside[key] = value[::-1]
        elif kind < 0.40 and isinstance(value, bytes):
            inside[key] = self.draw.randbytes(self.draw.choice((0, 1, len(value), len(value) + 3, 100_000)))
        elif kind < 0.55 and isinstance(value, int):
            near = value + self.draw.choice((-1, 1, 7, 2**16, -(2**16)))
            inside[key] = min(max(near, -(2**63)), 2**64 - 1)
        else:
            inside[key] = self._value()

    def _value(self) -> Any:
        draw = self.draw
        deep: Any = []
        for _ in range(draw.choice((1, 50, 300))):
            deep = [deep]
        return draw.choice(
            (
                draw.choice(_EXTREMES),
                draw.choice(_EXTREMES),
                draw.choice(_TEXTS),
                draw.choice((None, True, False, 0.5, float("nan"), float("inf"), 1e308)),
                draw.randbytes(draw.choice((0, 4, 32, 1000))),
                deep,
                {draw.choice(_TEXTS): draw.choice(_EXTREMES) for _ in range(3)},
                [draw.choice(_EXTREMES) for _ in range(draw.choice((0, 1, 5, 2000)))],
            )
        )

    def _garbled(self) -> bytes:
        data = bytearray(self.draw.choice(self._messages))
        for _ in range(self.draw.choice((1, 2, 8))):
            at = self.draw.randrange(len(data))
            kind = self.draw.randrange(4)
            if kind == 0:
                data[at] ^= 1 << self.draw.randrange(8)
            elif kind == 1:
                data[at] = self.draw.choice((0, 0x7F, 0x80, 0xC1, 0xDD, 0xDF, 0xC6, 0xFF))
            elif kind == 2:
                data[at:at] = self.draw.randbytes(self.draw.choice((1, 4, 40)))
            else:
                del data[at : at + self.draw.choice((1, 4, len(data)))]
            if not data:
                return b""
        return bytes(data)


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yield every container inside a value, with each of its keys; of long lists only some."""
    keys: Any = ()
    if isinstance(value, dict):
        keys = list(value)
    elif isinstance(value, list):
        keys = range(min(len(value), 8))
    for key in keys:
        yield value, key
        yield from _places(value[key])
