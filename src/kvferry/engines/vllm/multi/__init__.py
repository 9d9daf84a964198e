"""One KV connector that runs several connectors as its children: `connector.FerryMultiConnector`.

Every child stores KV. One child loads a request's KV; it is chosen as kvferry chooses between its own
sources.

- `settings`, `children`: read the configuration, and check that the configured connectors fit together
- `connector`: vLLM's hooks
- `child_admission`: decides which child loads a request, and follows each load to its end
- `completions`: merges what children report, and records which of them keep blocks and which loads are late
- `stats`: messages between the two halves, and counts for the engine's /metrics
"""
