"""Code that depends on vLLM's version: every import and attribute that moves between releases.

Written against one minor release (`engines.vllm.version`). A contract test introspects the installed one, and
import-linter keeps the connector's other modules from importing vLLM. Callers import from the module that has
the function.

- `contract`: the classes of the connector interface
- `connectors`: connectors by name, and configurations for connectors within one
- `process`: the log, the cores, the device, the ranks and the address of an engine's process
- `specs`: KV cache specs, and the needs of a continuation from a group
- `dtypes`: element types of the cache
- `layouts`: memory layouts, and the attention backends that take them
- `layers`: the engine's layer objects
- `models`: the models that a worker has built
- `drafts`: the settings of speculative decoding with a draft model
- `multimodal`: images, video and audio, and their processor
- `requests`, `request_ids`: a request in the scheduler, and its id
- `frees`: deferred freeing of blocks
- `arrivals`: requests as they enter the scheduler
- `spans`: vLLM's own tracing
"""
