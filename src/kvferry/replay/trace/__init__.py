"""Request traces: who asked when, for how many tokens, and which prefixes are equal. Never the tokens."""
