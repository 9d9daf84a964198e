"""The admin API: an operator looks up, pins and drops KV of a running engine, and drains the engine."""
