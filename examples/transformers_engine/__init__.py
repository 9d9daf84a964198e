"""A paged engine over transformers that stores, loads and hands over KV through kvferry's connector.

It runs one request at a time, decodes greedily, and has no prefix cache of its own. It does not use vLLM.

- `pages`: paged K and V of every layer, as transformers and kvferry see them
- `blocks`: the block pool, and the block tables of a request
- `identity`: facts that other engines must share to exchange KV with this one
- `engine`: the engine
- `tiers`: stores a prompt's KV in one process, and continues the prompt in others
- `handover`: takes a prompt's KV from a vLLM server, and gives KV of a prompt to it
"""
