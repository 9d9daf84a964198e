"""`kvferry doctor`: checks of this machine, a configuration and running engines, with advice.

- `finding`: the result of a check; `report`: output of the results.
- `limits`: deadlines for checks; `probes`: checks in separate processes, which can be killed.
- `machine`, `software`, `nixl`, `reads`, `costs`: checks of this machine.
- `settings`, `listening`, `storage`, `mounts`: checks of a configuration, and whether this machine fits it.
- `engines`, `http_engine`, `identity`, `pairs`, `ports`: checks of running engines, one by one and in pairs.
- `examine`: runs all checks in order.
"""
