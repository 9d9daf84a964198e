"""`kvferry doctor`: checks of this machine, a configuration and running engines, with advice.

- `finding`: the result of a check, its output, and deadlines for checks.
- `probes`: checks in separate processes, which can be killed.
- `machine`, `software`, `nixl`, `reads`, `costs`: checks of this machine.
- `listening`, `storage`: checks of a configuration, and whether this machine fits it.
- `engines`, `http_engine`, `engine_metrics`, `identity`, `ports`: checks of running engines, one by one;
  `pairs`: of two engines.
- `examine`: runs all checks in order.
"""
