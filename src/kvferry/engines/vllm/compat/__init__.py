"""Code that depends on vLLM's version: every import and attribute that moves between releases.

It is written for the minor releases that `engines.vllm.version` lists. Importing this package with another
release raises a ConfigError, before anything of vLLM is imported. A contract test inspects the installed
vLLM, and import-linter keeps the connector's other modules from importing vLLM. Callers import a function
from the module that defines it.

- `contract`: the classes of the connector interface
- `connectors`: connector classes by name, and configurations for connectors that are children of another
- `process`: logging, cores, device, ranks and address of the process that a connector runs in
- `memory`: ways in which the memory of a KV cache could be released or moved
- `specs`: KV cache specs, and the earlier tokens that a continuation needs from a group
- `dtypes`: element types of the cache
- `cpu_attention`: a trial of attention on a CPU
- `layouts`: memory layouts, and the attention backends that support them
- `layers`: the engine's layer objects
- `models`: the models that a worker has built
- `weights`: hooks into calls that change a worker's weights
- `drafts`: settings of speculative decoding with a draft model
- `loras`: a hook into the loading of LoRA adapters
- `multimodal`: images, video and audio, and their processor
- `requests`, `request_ids`: a request in the scheduler, and its id
- `frees`: deferred freeing of blocks
- `arrivals`: requests as they enter the scheduler
- `pauses`: pauses of the scheduler
- `spans`: vLLM's own tracing

Three modules hide differences between the supported releases:

- `hit_sources`: labels of cache hits, missing in 0.31
- `block_hashes`: the number of tokens that a block hash covers, which 0.31 does not store
- `kpool`: a KV cache spec that only 0.31 has
"""

from kvferry.engines.vllm.version import check_release, vllm_version

check_release(vllm_version())
