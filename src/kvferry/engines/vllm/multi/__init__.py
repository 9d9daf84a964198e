"""One KV connector that runs several connectors as its children: `connector.FerryMultiConnector`.

Every child stores KV. One child loads a request's KV; it is chosen as kvferry chooses between its own
sources.

- `settings`: reads the configuration
- `children`: finds the configured connectors, and checks that they fit together
- `connector`: vLLM's hooks on the scheduler, and the code that both halves share
- `worker_hooks`: vLLM's hooks on a worker
- `child_admission`: decides which child loads a request, and follows each load to its end
- `completions`: merges the completions that children report
- `block_holders`: records which children keep blocks of ended requests
- `meta`: messages between the two halves
- `counts`: counts how often each child is chosen, and how its loads end
- `stats`, `metrics`: send the counts to the engine's /metrics
"""
