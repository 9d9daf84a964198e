"""Prefill and decode engines as replicas of Ray Serve.

- `engine` is a replica: an engine, and the requests to it.
- `app` is the ingress that splits requests, and the application that `serve run` takes.
"""
