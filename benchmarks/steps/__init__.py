"""Compare the time that connectors take in each step of an engine that decodes many requests."""
