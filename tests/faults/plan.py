"""A plan of faults: pure, and the same for the same seed."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence

from faults.values import Fault, Kind

LONG = 4
"""A plan of so many faults per kind is a long one."""


def plan(seed: int, faults: int, families: Sequence[str], kinds: Mapping[str, Kind]) -> tuple[Fault, ...]:
    """Draw a plan: every kind twice, or once in a short one, then by `Kind.share`.

    Families get equal parts, but for kinds that need engines of certain families.

    Args:
        seed: decides everything.
        faults: at least as many as there are kinds.
        families: of engines; each is started once.
        kinds: by name; all of them can be met in these families.

    Raises:
        ValueError: fewer faults than kinds.
    """
    if faults < len(kinds):
        raise ValueError(f"{faults} faults are planned, there are {len(kinds)} kinds; plan that many or more")
    draw = random.Random(seed)
    names = sorted(kinds)
    certain = names * (2 if faults >= LONG * len(names) else 1)
    shares = [kinds[name].share for name in names]
    chosen = certain + draw.choices(names, shares, k=faults - len(certain))
    draw.shuffle(chosen)
    return tuple(
        Fault(
            number,
            name,
            _family(draw, families[number * len(families) // faults], families, kinds[name]),
            draw.randrange(1 << 31),
        )
        for number, name in enumerate(chosen)
    )


def _family(draw: random.Random, of: str, families: Sequence[str], kind: Kind) -> str:
    if not kind.families or of in kind.families:
        return of
    return draw.choice([name for name in families if name in kind.families])


def possible(kinds: Mapping[str, Kind], families: Sequence[str]) -> dict[str, Kind]:
    """Kinds that engines of these families can meet.

    >>> list(possible({"x": Kind("x", "", "", None, families=("a",))}, ["a", "b"]))
    ['x']
    """
    return {name: kind for name, kind in kinds.items() if not kind.families or {*kind.families} & {*families}}


def rounds(faults: Sequence[Fault], kinds: Mapping[str, Kind]) -> Iterator[list[Fault]]:
    """Yield the faults that are tried at the same time, none with more beside it than its kind allows.

    Kinds that allow many beside them come first, packed; the others stand alone.

    >>> many, alone = Kind("many", "", "", None, 2), Kind("alone", "", "", None, 1)
    >>> three = [Fault(n, kind, "f", 0) for n, kind in enumerate(("many", "alone", "many"))]
    >>> [[one.number for one in each] for each in rounds(three, {"many": many, "alone": alone})]
    [[0, 2], [1]]
    """
    packed: list[Fault] = []
    for fault in (one for one in faults if kinds[one.kind].together > 1):
        if len(packed) >= min([kinds[one.kind].together for one in (*packed, fault)]):
            yield packed
            packed = []
        packed.append(fault)
    if packed:
        yield packed
    for fault in faults:
        if kinds[fault.kind].together == 1:
            yield [fault]
