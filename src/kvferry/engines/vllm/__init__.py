"""kvferry in vLLM: one out-of-tree KV connector, `connector.KVFerryConnector`.

This package adapts vLLM to the package of kvferry's connector, which makes the decisions.

- `scheduler`, `worker`: map vLLM's hooks to the connector's two halves
- `requests`: wraps vLLM's requests and steps
- `info`: facts of the engine
- `meta`: messages between the halves
- `geometry`, `content`: describe the cache
- `identity`: facts on which engines must agree (`built` reads them from the model, `arguments` classifies
  vLLM's settings)
- `items`: names images and other items of prompts
- `compat`: code that depends on vLLM's version
- `multi`: another connector that runs several connectors, this one among them
- `plugin`: makes both connectors known to vLLM by name
"""
