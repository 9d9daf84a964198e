"""A Grafana dashboard and Prometheus alerts, generated from the definitions of the metrics.

`panels` builds PromQL and rejects unknown metrics and labels. `rows` defines the panels, and `alerts` the
alerts. `grafana` and `alerts.rules` render them as files
for Grafana and Prometheus.
"""

from kvferry.observe.dashboard.alerts import rules
from kvferry.observe.dashboard.grafana import dashboard

__all__ = ["dashboard", "rules"]
