"""What is at hand, and what becomes of it when it does not come.

`loads` is the life of a load on a worker, `pins` who owns the memory meanwhile, `bids` which source is asked.
`weights` says whose weights the content was computed with.
"""
