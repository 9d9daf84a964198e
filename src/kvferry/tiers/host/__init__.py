"""The host tier, which keeps chunks in host memory that the ranks of a node share.

`tier` is the entry point. `arena` allocates the shared memory, `slabs` divides it into slots, and
`slot_table` tracks the state of each slot. `memory_check` says whether an arena fits.
"""
