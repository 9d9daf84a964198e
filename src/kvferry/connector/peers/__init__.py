"""Exchange of KV with other engines.

`producer` offers the KV of computed prompts to peers. `source` reads the KV that peers offer. `kept` keeps
turns, and `connections` finds them at peers.
"""
