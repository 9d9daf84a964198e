"""kvferry in vLLM: one out-of-tree KV connector, `connector.KVFerryConnector`.

The package of kvferry's connector decides; this one adapts vLLM to it. `scheduler` and `worker` map vLLM's
hooks to the connector's two halves, `requests` wraps vLLM's requests and steps, `info` has the facts of the
engine, `meta` carries the messages of the halves. `geometry` and `content` describe the cache, `identity`
says what engines must agree on (`built` reads it from the model, `arguments` classifies vLLM's settings),
`items` names images and the like, `compat` holds what depends on vLLM's version. `multi` is another
connector, several of which this may be one; `plugin` makes both known to vLLM by name.
"""
