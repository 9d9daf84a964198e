"""The format of a chunk of KV cache, as a file and in memory.

`chunk` defines the parts of a file and encodes its header, `decode` reads and checks files, `body` works on
the content in memory, and `checksum` defines the digests. Nothing here does I/O by itself.
"""
