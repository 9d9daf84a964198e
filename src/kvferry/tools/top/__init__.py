"""`kvferry top`: read engines' `/metrics` periodically and show them on a terminal.

- Pure functions, in the order of the data: `exposition` (text to values and rates), `figures` (values to the
  figures that are shown), `detail` and `lines` (figures to text), with `layout`.
- Around them: `poller` reads all addresses periodically, and `live` draws the screen and handles keys.
"""
