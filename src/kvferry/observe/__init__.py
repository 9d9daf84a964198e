"""Turn the connector's events into metrics, request traces and OpenTelemetry spans.

The listeners are `metrics_listener`, `traces` and `spans`. `trace_server` keeps the events of the latest
requests for `kvferry explain`. This package does not depend on any inference engine.
"""

from kvferry.common.lazy import lazy_names

__getattr__ = lazy_names(__name__, __file__)
