"""Code that depends on vLLM's version: every import and attribute that moves between releases.

It is written for the minor releases that `engines.vllm.version` lists. Importing this package with another
release raises a ConfigError, before anything of vLLM is imported. A contract test inspects the installed
vLLM, and import-linter keeps the connector's other modules from importing vLLM. Callers import a function
from the module that defines it.

- `contract`: the classes of the connector interface
- `connectors`: connector classes by name, and configurations for connectors that are children of another
- `requests`, `request_ids`: requests and steps of the scheduler, and their ids
- `specs`, `layouts`, `layers`: what a KV cache holds, and how
- `models`, `multimodal`: the models that a worker has built, and their processor
- `scheduler`, `sleep`, `loras`, `weights`, `memory`, `wake`: hooks into vLLM
- `prefix_cache`: vLLM's prefix cache
- `block_events`, `spans`: KV events and traces that vLLM exports
- `process`, `cpu_attention`: the process that a connector runs in, and its processor

Two modules hide differences between the supported releases:

- `hit_sources`: labels of cache hits, missing in 0.31
- `block_hashes`: the number of tokens that a block hash covers, which 0.31 does not store
"""

from kvferry.engines.vllm.version import check_release, vllm_version

check_release(vllm_version())
