"""The format of a chunk, as a file and in memory.

Pure functions; digesting releases the interpreter's lock.
"""
