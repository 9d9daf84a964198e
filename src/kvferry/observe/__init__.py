"""The stream of events of an engine, and the listeners that turn it into metrics, traces and spans.

Code that decides something about a request emits an event (`events`) to an `EventStream` (`stream`). The
listeners are `metrics_listener`, `traces` and `spans`. Nothing here knows an engine.
"""
