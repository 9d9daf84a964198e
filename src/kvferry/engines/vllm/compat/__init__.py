"""Code that depends on vLLM's version: every import and attribute that moves between releases.

It is written for the minor releases that `engines.vllm.version` lists. Importing this package with another
release raises a ConfigError, before anything of vLLM is imported. A contract test inspects the installed
vLLM, and import-linter keeps the connector's other modules from importing vLLM. Callers import a function
from the module that defines it.

- `connectors`: the connector interface, connector classes by name, and configurations for connectors that
  are children of another
- `requests`: requests and steps of the scheduler, and their ids
- `specs`: what a KV cache holds
- `model`: the models that a worker has built, their layers, layouts, adapters and weights
- `scheduler`: hooks into vLLM's scheduler, and its prefix cache
- `block_events`: KV events that vLLM publishes
- `process`, `cpu_attention`: the process that a connector runs in, its memory, sleep and traces, and its
  processor
"""

from kvferry.engines.vllm.version import check_release, vllm_version

check_release(vllm_version())
