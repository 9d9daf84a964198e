"""Time to first token if KV is handed over while the prompt is computed, and after it."""
