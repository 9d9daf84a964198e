"""Measure the bytes that the turns of a conversation move between a prefill and a decode engine."""
