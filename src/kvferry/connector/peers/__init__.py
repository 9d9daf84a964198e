"""Exchange of KV with other engines.

`producer` offers the KV of computed prompts to peers. `source` reads the KV that peers offer. `turn_keeper`
keeps the KV of finished requests for the next turn of their conversation. `turn_finder` finds such KV at
peers.
"""
