"""Measure the time to redeem a ticket, the random id that claims the lease on offered KV blocks."""
