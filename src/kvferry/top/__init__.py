"""`kvferry top`: engines' `/metrics`, read periodically and shown on a terminal.

Pure steps, in order: `exposition` (text to values), `window` (two readings to rates), `derive` (values to
`figures`), `lines` (figures to text). Around them: `addresses` keeps the state of each address, `poller`
reads all periodically, and `live` drives the terminal.
"""
