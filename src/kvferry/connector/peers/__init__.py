"""Exchange of KV with other engines.

`peering` holds both ends of the control channel, and what uses them: `producer` offers the KV of computed
prompts to peers, and `source` reads the KV that peers offer. `turns` keeps turns, and finds them at peers.
"""
