"""`kvferry top`: read engines' `/metrics` periodically and show them on a terminal.

- Pure functions, in the order of the data: `exposition` (text to values), `window` (two readings to rates),
  `figures` (values to figures), `lines` (figures to text).
- Around them: `poller` reads all addresses periodically and keeps the state of each, and
  `live` draws the screen and handles keys.
"""
