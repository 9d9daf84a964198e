"""A plan of faults: pure, and the same for the same seed."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence

from faults.values import Fault, Kind


def plan(seed: int, faults: int, families: Sequence[str], kinds: Mapping[str, Kind]) -> tuple[Fault, ...]:
    """Draw a plan: every kind at least once, then by `Kind.share`; families in order, in equal parts.

    Args:
        seed: decides everything.
        faults: at least as many as there are kinds.
        families: of engines; each is started once.
        kinds: by name.

    Raises:
        ValueError: fewer faults than kinds.
    """
    if faults < len(kinds):
        raise ValueError(f"{faults} faults are planned, there are {len(kinds)} kinds; plan at least as many")
    draw = random.Random(seed)
    names = sorted(kinds)
    chosen = names + draw.choices(names, [kinds[name].share for name in names], k=faults - len(names))
    draw.shuffle(chosen)
    return tuple(
        Fault(number, name, families[number * len(families) // faults], draw.randrange(1 << 31))
        for number, name in enumerate(chosen)
    )


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
