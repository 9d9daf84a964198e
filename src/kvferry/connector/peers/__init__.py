"""Exchange of KV with other engines.

`producer` offers the KV of computed prompts to peers. `source` reads the KV that peers offer. `turn_keeper`
keeps turns, and `turn_finder` finds them at peers.
"""
