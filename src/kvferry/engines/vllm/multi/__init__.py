"""Several KV connectors in one: `connector.FerryMultiConnector`.

Every child stores; which of them loads a request is chosen as kvferry chooses between its own sources.
`settings` reads the configuration, `children` makes what it names agree, `choosing` decides who loads and
sees loads to their end, `completions` joins what children report into what the engine may be told, `meta` is
what the two halves say to each other, `stats` and `metrics` carry counts to the engine's /metrics.
"""
