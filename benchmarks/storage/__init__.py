"""Compare how soon kvferry and vLLM's ExampleConnector store a prompt, and load it again."""
