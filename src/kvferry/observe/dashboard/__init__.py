"""A Grafana dashboard and Prometheus alerts, generated from the definitions of the metrics.

`expressions` builds PromQL and refuses unknown metrics and labels. `requests`, `loads`, `storage` and
`alerts` define the panels and alerts. `grafana` and `alerts.rules` render them as files that Grafana and
Prometheus load.
"""

from kvferry.observe.dashboard.alerts import rules
from kvferry.observe.dashboard.grafana import dashboard

__all__ = ["dashboard", "rules"]
