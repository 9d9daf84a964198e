"""Request traces: who asked when, for how many tokens, and which prefixes are equal. Never the tokens.

- `open` finds out the format of a file. `hashed` reads requests with ids of content, `csv_trace`, `spans` and
  `recorded` others with times, and `aiperf`, `weka` and `conversations` sessions.
- `workload` makes up content of requests of which only the lengths are known, and traces of users who hold
  conversations.
"""
