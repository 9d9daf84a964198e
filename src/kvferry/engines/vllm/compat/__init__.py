"""Code that depends on vLLM's version: every import and attribute that moves between releases.

It is written for the minor releases that `engines.vllm.version` lists. Importing this package with another
release raises a ConfigError, before anything of vLLM is imported. A contract test inspects the installed
vLLM, and import-linter keeps the connector's other modules from importing vLLM. Callers import a function
from the module that defines it.

- `connectors`: classes of the connector interface, and configurations for children of another connector
- `requests`: requests and steps of the scheduler, their ids and block hashes
- `specs`: what a KV cache holds
- `model`: the models that a worker has built, their layouts, weights, adapters and processor
- `scheduler`: hooks into vLLM's scheduler, its prefix cache, and labels of cache hits
- `process`: the process that a connector runs in, its sleep and its traces
- `block_events`: KV events that vLLM exports
- `cpu_attention`: a check of the instructions of a CPU
"""

from kvferry.engines.vllm.version import check_release, vllm_version

check_release(vllm_version())
