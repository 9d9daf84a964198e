"""A Grafana dashboard and Prometheus alerts, generated from the definitions of the metrics.

`expressions` names series and refuses what is no metric or no label of it; `requests`, `loads`, `storage` and
`alerts` say what is asked; `grafana` and `rules` write that down in the form in which it can be loaded.
"""

from kvferry.observe.dashboard.grafana import dashboard
from kvferry.observe.dashboard.rules import rules

__all__ = ["dashboard", "rules"]
