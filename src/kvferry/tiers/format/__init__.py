"""The format of a chunk of KV cache, as a file and in memory. Nothing here does I/O by itself.

`chunk` defines the parts of a file and encodes its header, `decode` makes, reads and checks files.
"""
