"""Start engines together, with a router in front of them.

- `launch`: `Fleet`, the processes; `specs`: the engines to start; `role`: their roles; `kv_config`: their
  connector setting.
- `router`: one OpenAI endpoint over prefill and decode engines, wherever they were started.
"""
