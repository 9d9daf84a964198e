"""KV exchanged with other engines.

`producer` makes offers, `source` uses them; `turn_keeper` keeps finished requests, `turn_finder` finds them.
"""
