"""The format of a chunk of KV cache, as a file and in memory.

`chunk` defines the parts of a file and encodes its header, and `decode` reads and checks files
and works on the content in memory. Nothing here does I/O by itself.
"""
