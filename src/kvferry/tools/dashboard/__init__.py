"""A Grafana dashboard and Prometheus alerts, generated from the definitions of the metrics.

`panels` builds PromQL and rejects unknown metrics and labels. `rows` has the panels, which `grafana` renders
for Grafana. `alerts` has the alerts, and renders them for Prometheus.
"""

from kvferry.tools.dashboard.alerts import rules
from kvferry.tools.dashboard.grafana import dashboard

__all__ = ["dashboard", "rules"]
