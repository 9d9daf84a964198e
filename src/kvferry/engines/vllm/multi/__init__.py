"""One KV connector that runs several connectors as its children: `connector.FerryMultiConnector`.

Every child stores KV. One child loads a request's KV; it is chosen as kvferry chooses between its own
sources.

- `settings`, `children`: read the configuration, and check that the configured connectors fit together
- `connector`, `worker_hooks`: vLLM's hooks
- `child_admission`, `late_loads`: decide which child loads a request, and follow each load to its end
- `completions`, `block_holders`: merge what children report, and record which of them keep blocks
- `meta`: messages between the two halves
- `stats`, `metrics`: counts for the engine's /metrics
"""
