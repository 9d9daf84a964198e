"""The file tier: chunk files in a directory. Processes that share it also share its capacity.

`tier` is the entry point, with its settings. `opening` prepares a directory. `ledger` keeps its capacity and
bytes in use, under a lock. `space` reserves space for new files and evicts old ones. `directory_index` lists
the chunks, and `chunk_file` reads and writes them. `admin` implements operator commands.
"""
