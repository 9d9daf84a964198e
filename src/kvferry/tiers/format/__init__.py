"""The format of a chunk, as a file and in memory. Pure, except that digesting yields to other threads."""
