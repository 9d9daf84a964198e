"""How the pages of attention backends move, as the connector's proof finds it.

``backends.csv`` is the table of docs/backends.md. A test runs the proof that engines run at start
(`page_of_attention`) over vLLM's backends, and compares it with the table. So a forecast has no decision of
its own about the content of pages.
"""

from __future__ import annotations

import csv
import re
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import NamedTuple

from kvferry.errors import ConfigError
from kvferry.geometry.models.dtypes import FLOATS

_NOT_RUN = "not run"


class _Row(NamedTuple):
    backend: str
    dtypes: str
    layouts: str
    moves_as: str
    shown_by: str


@dataclass(frozen=True, slots=True)
class BackendPages:
    """How the pages of an attention backend move, for one KV cache dtype and layout.

    Attributes:
        fields: names of the fields of a page; empty if its pages move whole.
        why_whole: reason why pages move whole; empty if they move by fields.
    """

    backend: str
    fields: tuple[str, ...] = ()
    why_whole: str = ""


def pages_of(backend: str, dtype: str, layout: str) -> BackendPages:
    """Return how the pages of an attention backend move.

    >>> pages_of("FLASH_ATTN", "fp8", "BHLNC").fields
    ('k', 'v')
    >>> pages_of("CPU_MLA", "auto", "BLHNC").why_whole
    'nothing is proved of them in layout BLHNC'

    Args:
        backend: name of the backend, as vLLM's ``--attention-backend`` takes it.
        dtype: element type of the KV cache, one of `CACHE_DTYPES`.

    Raises:
        ConfigError: the backend does not support the element type or the layout.
    """
    # Without a proof, pages move whole. Some backends can be proved only on a machine that has them.
    rows = [row for row in _table() if row.backend == backend]
    if not rows:
        return BackendPages(backend, why_whole="kvferry does not know this backend")
    name = "auto" if dtype in FLOATS else dtype
    fitting = [row for row in rows if not row.dtypes or name in row.dtypes.split()]
    if not fitting:
        known = ", ".join(dict.fromkeys(one for row in rows for one in row.dtypes.split()))
        raise ConfigError(f"{backend} does not take KV cache dtype {dtype}; choose one of {known}")
    for row in fitting:
        if row.layouts in ("", "any") or layout in row.layouts.split():
            return _pages(row, layout)
    known = ", ".join(dict.fromkeys(one for row in fitting for one in row.layouts.split()))
    raise ConfigError(f"{backend} does not take layout {layout} with {dtype}; choose one of {known}")


def takes(backend: str, dtype: str) -> bool:
    """Return True if the table says that an attention backend supports an element type of the KV cache."""
    name = "auto" if dtype in FLOATS else dtype
    return any(row.backend == backend and name in row.dtypes.split() for row in _table())


def _pages(row: _Row, layout: str) -> BackendPages:
    if row.moves_as == _NOT_RUN:
        return BackendPages(row.backend, why_whole=f"they are proved only where it runs: {row.shown_by}")
    if fields := tuple(re.findall(r"`([^`]+)`", row.moves_as)):
        return BackendPages(row.backend, fields)
    return BackendPages(row.backend, why_whole=f"nothing is proved of them in layout {layout}")


@cache
def _table() -> tuple[_Row, ...]:
    lines = (files("kvferry.tools.plan") / "backends.csv").read_text().splitlines()
    return tuple(_Row(*row) for row in csv.reader(lines[1:]))
