"""Start engines together, with a router in front of them.

- `launch`: `Fleet`, which starts and stops the engine processes.
- `specs`: specifications of the engines to start; `role`: prefill, decode or both; `kv_config`: the value of
  ``--kv-transfer-config``.
- `router`: one OpenAI endpoint over prefill and decode engines, wherever they were started.
"""
