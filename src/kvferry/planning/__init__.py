"""Which bytes go from where to where, as pure array arithmetic.

- `retile`: two page formats to the loops that move one cell: what a layout change, a resharding or a block
  size change comes down to. `plane`: where the cells of a block lie on each side.
- `template`: one rank's geometry against all ranks of a peer: the pieces each peer rank supplies, as
  lists a transport can prepare at handshake.
- `select`: which tokens, hence which blocks, a request needs of each group.
- `coverage`: how much of a prefix can be used, when every group has other chunks of it at hand; which chunks
  that takes, and what was missing for more.
- `request`: template and block tables to the descriptors of one request, without a Python loop over them.
"""
