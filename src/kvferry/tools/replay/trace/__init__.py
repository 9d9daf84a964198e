"""Request traces: who asked when, for how many tokens, and which prefixes are equal. Never the tokens.

- `open` finds out the format of a file, and `hashed`, `csv_trace` and `recorded` read one format each.
- `hashed` also gives content to requests of which only the lengths are known. `workload` makes up
  traces of users who hold conversations.
"""
