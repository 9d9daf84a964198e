"""`kvferry doctor`: checks of this machine, a configuration and running engines, with advice.

- `finding`: the result of a check; `report`: how results are printed.
- `limits`: deadlines for checks; `probes`: code that runs in processes of its own, so that it can be killed.
- `machine`, `software`, `nixl`, `reads`, `costs`: this machine.
- `settings`, `listening`, `storage`, `mounts`: what a configuration needs from this machine.
- `engines`, `http_engine`, `identity`, `pairs`: running engines, one by one and in pairs.
- `examine`: all checks in order.
"""
