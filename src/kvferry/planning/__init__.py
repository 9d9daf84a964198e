"""Planning: the source and destination addresses of all bytes that a transfer copies.

The modules contain array arithmetic only. They turn two descriptions of memory into the descriptors of one
request.

- `cell_copy`: the strided copies of one cell, from two page formats. This one step covers resharding, layout
  changes and block size changes. `strided_copy` and `descriptors` define its values.
- `template`: the routes from each rank of a peer to this rank, computed once per handshake.
- `select`: the tokens, and thus the blocks and cells, that a request needs of each group, and how the blocks
  of two engines meet.
- `coverage`: the longest prefix that can be loaded, the chunks to load for it, and what is missing for a
  longer one.
- `chunk_cells`: the cells of stored or loaded chunks.
- `retention`: the chunks of a prompt to store, and the positions of additional snapshots.
- `strategy`: the cheapest transfer method. `packed_image`: cells packed for over-read and staged transfers.
- `prepared_lists`: the descriptors of one request as indices, without a Python loop over them.
"""

from kvferry.planning.cell_copy import ONE_CELL, PoolCopies
from kvferry.planning.chunk_cells import TableSlice
from kvferry.planning.coverage import (
    NO_TIER,
    Bools,
    ChunkedPrompt,
    Coverage,
    TierNumbers,
    chunks_to_load,
    find_coverage,
    widest_group,
)
from kvferry.planning.descriptors import Int64s, merge
from kvferry.planning.prepared_lists import DescriptorIndices, count_transfer
from kvferry.planning.retention import (
    MAX_CHUNKS_PER_ORDER,
    bytes_of_snapshots,
    first_snapshot,
    keeps_chunk,
    keeps_snapshot,
    last_prefix_ends,
    needed_chunks,
    snapshot_interval_of,
    snapshot_positions,
)
from kvferry.planning.select import (
    STATE_BLOCKS,
    Cells,
    LoadSpan,
    attends_to_all,
    first_attended,
    needed_tokens,
    select_cells,
    windows_survive_load,
)
from kvferry.planning.strategy import (
    COPY_ENGINE_BYTES,
    LARGEST_SEGMENT_BYTES,
    Costs,
    Strategy,
    TransferMethod,
    choose_method,
    segment_bytes,
    transfer_methods,
)
from kvferry.planning.strided_copy import Loop, StridedCopy
from kvferry.planning.template import Route, Template, absent_layer_names, build_templates, window_mismatches

__all__ = [
    "COPY_ENGINE_BYTES",
    "LARGEST_SEGMENT_BYTES",
    "MAX_CHUNKS_PER_ORDER",
    "NO_TIER",
    "ONE_CELL",
    "STATE_BLOCKS",
    "Bools",
    "Cells",
    "ChunkedPrompt",
    "Costs",
    "Coverage",
    "DescriptorIndices",
    "Int64s",
    "LoadSpan",
    "Loop",
    "PoolCopies",
    "Route",
    "Strategy",
    "StridedCopy",
    "TableSlice",
    "Template",
    "TierNumbers",
    "TransferMethod",
    "absent_layer_names",
    "attends_to_all",
    "build_templates",
    "bytes_of_snapshots",
    "choose_method",
    "chunks_to_load",
    "count_transfer",
    "find_coverage",
    "first_attended",
    "first_snapshot",
    "keeps_chunk",
    "keeps_snapshot",
    "last_prefix_ends",
    "merge",
    "needed_chunks",
    "needed_tokens",
    "segment_bytes",
    "select_cells",
    "snapshot_interval_of",
    "snapshot_positions",
    "transfer_methods",
    "widest_group",
    "window_mismatches",
    "windows_survive_load",
]
