"""Planning: which bytes move from where to where, as pure array arithmetic.

From two descriptions of memory to the descriptors of one request:

- `page_copy`: two page formats to the strided copies that move one cell. Resharding, layout changes and block
  size changes are all this one step. `cell_copy`, `strided_copy`, `descriptors`: its values.
- `template`: our rank's geometry and those of a peer's ranks to the routes between them, once per handshake.
- `select`: the tokens, hence the blocks and cells, that a request needs of each group.
- `coverage`: the longest usable prefix when groups have different chunks cached, the chunks to load for it,
  and the chunks that are missing for a longer one. `chunk_cells`: their cells. `retention`: the chunks to
  keep.
- `strategy`: direct, over-read or staged, by expected cost. `packed_image`: the layout of staged bytes.
- `prepared_lists`: the descriptors of one request as indices, without a Python loop over them.
"""
