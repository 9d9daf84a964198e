"""The canonical form: what a chunk's bytes are, whoever wrote them.

A *chunk* is a fixed number of tokens of one KV cache group, or one snapshot of recurrent state. `form` says
which byte of it is what, independent of parallel sizes, layout and block size; `derive` finds that for an
engine; `place` puts chunks into memory, as a `RankGeometry` in which one block is one chunk. Storing is then
a plan from the engine's ranks to that geometry, loading a plan from it, by the planner of every movement.
"""

from kvferry.geometry.canonical.derive import canonical_form_of
from kvferry.geometry.canonical.form import (
    CanonicalForm,
    CanonicalGroup,
    FormSection,
    SectionField,
    unit_count,
)
from kvferry.geometry.canonical.place import chunk_pool

__all__ = [
    "CanonicalForm",
    "CanonicalGroup",
    "FormSection",
    "SectionField",
    "canonical_form_of",
    "chunk_pool",
    "unit_count",
]
