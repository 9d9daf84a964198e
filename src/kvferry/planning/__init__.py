"""Planning: computation of the source and destination addresses of all bytes that a transfer copies.

The modules contain array arithmetic only. They turn two descriptions of memory into the descriptors of one
request. A *cell* is the part of a block that is copied as one unit; its number of tokens is the greatest
common divisor of both block sizes. A *route* is a set of layers that are copied together between two ranks.

- `page_copy`: computes, from two page formats, the strided copies of one cell. This one step covers
  resharding, layout changes and block size changes. `cell_copy`, `strided_copy` and `descriptors` define its
  values.
- `template`: computes the routes from each rank of a peer to this rank, once per handshake.
- `select`: selects the tokens, and thus the blocks and cells, that a request needs of each group.
- `coverage`: computes the longest prefix that can be loaded if groups have different chunks cached, the
  chunks to load for it, and the chunks that are missing for a longer prefix.
- `chunk_cells`: selects the cells of stored or loaded chunks.
- `retention`: decides which chunks of a prompt to store.
- `snapshots`: decides at which positions an engine takes snapshots of recurrent state for other prompts.
- `strategy`: chooses between direct, over-read and staged transfers by expected cost.
- `packed_image`: computes the layout of cells that are packed for over-read and staged transfers.
- `prepared_lists`: computes the descriptors of one request as indices, without a Python loop over them.
"""
