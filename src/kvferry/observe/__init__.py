"""Listeners that turn the connector's events into metrics, traces and spans.

They are `metrics_listener`, `traces` and `spans`. `explaining` answers questions about the latest requests.
This package does not depend on an engine.
"""
