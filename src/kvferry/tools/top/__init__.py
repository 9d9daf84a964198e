"""`kvferry top`: read engines' `/metrics` periodically and show them on a terminal.

- Pure functions, in the order of the data: `exposition` (text to values), `window` (two readings to rates),
  `derive` (values to `figures`), `lines` (figures to text).
- Around them: `addresses` keeps the state of each address, `poller` reads all addresses periodically, and
  `live` draws the screen and handles keys.
"""
