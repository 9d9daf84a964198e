"""The canonical form: the byte order of a stored chunk, the same for every engine that serves a model.

`form` defines the bytes, and describes a pool of chunks as a `RankGeometry`. So the planner treats the pool
as another engine. `derive` computes the form, and the number of tokens of a chunk, from an engine's geometry.
`share` computes the share of a chunk that the ranks of one machine hold.
"""

from kvferry.geometry.canonical.derive import (
    canonical_form_of,
    check_blocks,
    chunk_length,
    content_alignment,
    first_prefix,
    snapshot_interval,
    whole_block_tokens,
)
from kvferry.geometry.canonical.form import (
    CanonicalForm,
    CanonicalGroup,
    FormSection,
    SectionField,
    chunk_pool,
    unit_count,
)
from kvferry.geometry.canonical.share import share_of

__all__ = [
    "CanonicalForm",
    "CanonicalGroup",
    "FormSection",
    "SectionField",
    "canonical_form_of",
    "check_blocks",
    "chunk_length",
    "chunk_pool",
    "content_alignment",
    "first_prefix",
    "share_of",
    "snapshot_interval",
    "unit_count",
    "whole_block_tokens",
]
