"""KV kept in tiers: `storing` stores chunks as they are computed, `source` loads them for later requests."""
