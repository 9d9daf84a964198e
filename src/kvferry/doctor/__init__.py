"""`kvferry doctor`: checks of this machine, a configuration and running engines, and what to fix.

- `finding`: what a check says; `report`: how it is printed.
- `limits`: no check waits longer than it may; `probes`: what runs in processes of its own, to be killed.
- `machine`, `software`, `nixl`, `reads`, `costs`: this machine.
- `settings`, `listening`, `storage`, `mounts`: what a configuration names here.
- `engines`, `http_engine`, `meeting`, `pairs`: engines that run, one by one and two by two.
- `examine`: all of it, in order.
"""
