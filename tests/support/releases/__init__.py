"""Other releases of vLLM beside the pinned one: install their Python, and run the contract tests on it."""
