"""What can be seen of kvferry: one stream of events, and what readers make of it.

Whoever decides something about a request says so once (`events`), to a `watch`; metrics (`fold`) are one
reader of it. Nothing here knows an engine.
"""
