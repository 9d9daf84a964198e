"""Exchange of KV with other engines.

`producer` offers the KV of computed prompts to peers, `streams` that of prompts that are still computed.
`source` reads the KV that peers offer, with an exchange (`claims`) for each request. `offer` has what travels
with a request. `turns` keeps the KV of conversations, and finds it at peers.
"""
