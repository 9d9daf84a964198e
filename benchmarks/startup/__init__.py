"""Measure what a connector adds to the start of a vLLM engine: seconds, memory, and seconds of the stop."""
