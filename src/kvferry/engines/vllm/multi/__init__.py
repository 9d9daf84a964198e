"""Several KV connectors in one: `connector.FerryMultiConnector`.

Every child stores. One child loads a request, chosen as kvferry chooses between its own sources.

- `settings`: reads the configuration
- `children`: makes the connectors that it names, and checks that they agree
- `connector`: vLLM's hooks on the scheduler, and what both halves share
- `worker_hooks`: vLLM's hooks on a worker
- `child_admission`: decides which child loads a request, and follows each load to its end
- `completions`: joins the completions that children report
- `endings`: collects which children keep blocks of ended requests
- `meta`: carries messages between the two halves
- `counts`: counts the choices and the loads of each child
- `stats`, `metrics`: carry counts to the engine's /metrics
"""
