from kvferry.planning.cell_copy import ONE_CELL as ONE_CELL, PoolCopies as PoolCopies
from kvferry.planning.chunk_cells import TableSlice as TableSlice
from kvferry.planning.coverage import (
    Bools as Bools,
    ChunkedPrompt as ChunkedPrompt,
    chunks_to_load as chunks_to_load,
    longest_prefixes as longest_prefixes,
    needed_chunk_range as needed_chunk_range,
    widest_group as widest_group,
)
from kvferry.planning.descriptors import Int64s as Int64s, merge as merge
from kvferry.planning.prepared_lists import (
    DescriptorIndices as DescriptorIndices,
    count_transfer as count_transfer,
)
from kvferry.planning.retention import (
    MAX_CHUNKS_PER_ORDER as MAX_CHUNKS_PER_ORDER,
    bytes_of_snapshots as bytes_of_snapshots,
    chunks_to_store as chunks_to_store,
    first_snapshot as first_snapshot,
    keeps_snapshot as keeps_snapshot,
    last_prefix_ends as last_prefix_ends,
    needed_chunks as needed_chunks,
    snapshot_interval_of as snapshot_interval_of,
    snapshot_positions as snapshot_positions,
)
from kvferry.planning.select import (
    STATE_BLOCKS as STATE_BLOCKS,
    Cells as Cells,
    LoadSpan as LoadSpan,
    attends_to_all as attends_to_all,
    first_attended as first_attended,
    first_needed_token as first_needed_token,
    needed_tokens as needed_tokens,
    select_cells as select_cells,
    windows_survive_load as windows_survive_load,
)
from kvferry.planning.strategy import (
    COPY_ENGINE_BYTES as COPY_ENGINE_BYTES,
    LARGEST_SEGMENT_BYTES as LARGEST_SEGMENT_BYTES,
    Costs as Costs,
    Strategy as Strategy,
    TransferMethod as TransferMethod,
    choose_method as choose_method,
    segment_bytes as segment_bytes,
    transfer_methods as transfer_methods,
)
from kvferry.planning.strided_copy import Loop as Loop, StridedCopy as StridedCopy
from kvferry.planning.template import (
    Route as Route,
    Template as Template,
    absent_layer_names as absent_layer_names,
    build_templates as build_templates,
    window_mismatches as window_mismatches,
)
