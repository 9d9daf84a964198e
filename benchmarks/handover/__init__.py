"""Compare hand-overs between two engines with those of vLLM's NixlConnector, up to the first token."""
