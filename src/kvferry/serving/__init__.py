"""Engines started together, and the router in front of them.

- `launch`: `Fleet`, the processes; `specs`: which engines to start; `role`: what each does; `kv_config`: the
  setting that makes them exchange KV.
- `router`: one OpenAI endpoint over prefill and decode engines, wherever they were started.
"""
