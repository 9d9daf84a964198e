"""What people run around the connector: commands, checks, forecasts, the router."""
