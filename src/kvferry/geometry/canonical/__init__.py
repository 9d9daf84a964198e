"""The canonical form: the order of a chunk's bytes, the same from every engine.

A *chunk* is a fixed number of tokens of one KV cache group, or one snapshot of recurrent state. `form`
defines its bytes, independent of parallel sizes, layout and block size. `derive` computes the form for an
engine. `place` puts chunks into memory, as a `RankGeometry` in which one block is one chunk. The planner of
every transfer then plans a store from the engine's ranks to that geometry, and a load from that geometry.
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
