"""kvferry in vLLM: one out-of-tree KV connector, `connector.KVFerryConnector`.

A connector has two halves that never share memory. The scheduler half decides (`scheduler`): what it offers
other engines (`producer`), which source serves a request (`admission`, over `peer_source` and
`tier_source`), what the tiers get to keep (`tiering`, `storing`). The worker half moves (`worker`); `meta` is
what they say to each other, once per engine step. `geometry` and `content` describe the cache, `identity`
says what engines must agree on (`built` reads it from the model, `arguments` classifies vLLM's settings),
`offer` is what travels with a request, `prompts` names what requests are made of, `compat` holds what depends
on vLLM's version. `multi` is another connector, several of which this may be one; `plugin` makes both known
to vLLM by name.
"""
