"""A paged engine over transformers that stores, loads and hands over KV through kvferry's connector.

It has one request at a time, greedy decoding, and no prefix cache of its own. It does not use vLLM.

- `pages`: paged K and V of every layer, as transformers and kvferry see them
- `blocks`: the block pool, and the block tables of a request
- `identity`: facts that other engines must share
- `engine`: the engine
- `tiers`: stores a prompt in one process and continues from it in others
- `handover`: takes prompts from a vLLM server, and gives it some
"""
