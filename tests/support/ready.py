"""Values as the Python that makes them, so that a failing case is printed as a test that can be pasted."""

from __future__ import annotations

import enum
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np


def source_of(value: Any) -> str:
    """An expression that makes `value`: dataclasses, enums, arrays and containers of them."""
    if isinstance(value, enum.Enum):
        return f"{type(value).__name__}.{value.name}"
    if is_dataclass(value):
        inner = ", ".join(f"{f.name}={source_of(getattr(value, f.name))}" for f in fields(value))
        return f"{type(value).__name__}({inner})"
    if isinstance(value, np.ndarray):
        return f"np.array({value.tolist()}, np.{value.dtype})"
    if isinstance(value, frozenset):
        return f"frozenset({{{', '.join(sorted(map(source_of, value)))}}})" if value else "frozenset()"
    if isinstance(value, tuple):
        return f"({', '.join(map(source_of, value))}{',' if len(value) == 1 else ''})"
    return repr(value)
