"""The canonical form: the byte order of a stored chunk, the same for every engine that serves a model.

`form` defines the bytes, which do not depend on parallel sizes, layout or block size. `derive` computes the
form from the geometry of an engine. `chunk_pool` describes a pool of chunks as a `RankGeometry` in which one block
is one chunk. So the planner treats the pool as another engine: a store is a transfer from the engine's ranks
to the pool, and a load is a transfer from the pool.
"""

from kvferry.geometry.canonical.derive import canonical_form_of
from kvferry.geometry.canonical.form import (
    CanonicalForm,
    CanonicalGroup,
    FormSection,
    SectionField,
    chunk_pool,
    unit_count,
)

__all__ = [
    "CanonicalForm",
    "CanonicalGroup",
    "FormSection",
    "SectionField",
    "canonical_form_of",
    "chunk_pool",
    "unit_count",
]
