"""What tiers cost a scheduler and an engine, and what they bring."""
