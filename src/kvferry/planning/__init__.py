"""Planning: the source and destination addresses of all bytes that a transfer copies, as array arithmetic.

- `cell_copy`: the strided copies of one cell, from two page formats. This one step covers resharding, layout
  changes and block size changes. `strided_copy` and `descriptors` define its values.
- `template`: the routes from each rank of a peer to this rank, computed once per handshake.
- `select`: the tokens, and thus the blocks and cells, that a request needs of each group, and how the blocks
  of two engines meet.
- `coverage`: the longest prefix that can be loaded, and what is missing for a longer one.
- `chunk_cells`: the cells of stored or loaded chunks.
- `retention`: the chunks of a prompt to store, and the positions of additional snapshots.
- `strategy`: the cheapest transfer method. `packed_image`: cells packed for over-read and staged transfers.
- `prepared_lists`: the descriptors of one request as indices, without a Python loop over them.
"""

from kvferry.common.lazy import lazy_names

__getattr__ = lazy_names(__name__, __file__)
