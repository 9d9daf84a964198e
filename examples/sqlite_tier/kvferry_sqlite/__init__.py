"""A storage tier of kvferry that keeps chunks in a SQLite database."""
