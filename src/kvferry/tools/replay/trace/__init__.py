"""Request traces: who asked when, for how many tokens, and which prefixes are equal. Never the tokens.

- `open` finds out the format of a file, and `hashed`, `csv_trace` and `recorded` read one format each.
- `workload` makes up content of requests of which only the lengths are known, and traces of users who hold
  conversations.
"""
