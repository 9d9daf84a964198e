"""Measure the time that tiers cost a scheduler and an engine, and the time to first token that they save."""
