"""What handing a model's KV cache over will take, and what the tiers keep of it, before any engine runs.

- `find`, `table`: a model's ``config.json``, from a file, a folder, the built-in table or the hub.
- `side`: the flags of one engine to its shape, with what vLLM would choose for what is not given.
- `request`: a made-up request with scattered block tables.
- `planes`: K and V laid out apart.
- `setting`: both engines laid out, and the request on them.
- `forecast`, `moved`, `cost`: the planner run on it: what moves, in which pieces, which way, how long.
- `snapshots`: where the engine leaves snapshots of recurrent state, by its settings.
- `kept`, `choices`: what the tiers keep of a prompt by the settings, and how much of it can be used.
- `show`, `numbers`, `show_kept`, `numbers_kept`: both on a terminal and as JSON.
- `page`: a picture of it, as one HTML file.

Nothing here has a formula of its own for what moves: geometry is laid out, templates are built, cells
selected and tallied by the code that serves a real request.
"""
