"""kvferry in vLLM: an out-of-tree KV connector, `connector.KVFerryConnector`.

This package adapts vLLM to kvferry's engine-independent connector, which makes all decisions. The connector
has two halves: one in the scheduler's process, and one in each worker process.

- `connector`, `scheduler`, `worker`: vLLM's hooks, in front of the halves
- `messages`: messages between the two halves, and metrics
- `config`, `transfer_config`, `layout`: settings, and the layout of the KV cache that they ask for
- `geometry`, `content`, `state`, `cache_guard`: where KV lies in a worker's memory, and what its bytes mean
- `identity`, `built`: facts that must be equal in two engines before they exchange KV
- `items`: names images and other items of prompts by their content
- `compat`: code that depends on vLLM's version
- `multi`: another connector, which runs several connectors as its children
- `plugin`: registers both connectors with vLLM by name
"""

from kvferry.common.lazy import lazy_names

__getattr__ = lazy_names(__name__, __file__)
