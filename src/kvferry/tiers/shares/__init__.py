"""Chunks of an engine on several machines: each machine has an arena, with its share of every chunk."""
