"""What people run around the connector: commands, checks, forecasts, the router. The core imports none of it."""
