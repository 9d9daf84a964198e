"""Moving bytes between engines, and agreeing on how.

- `agent`: NIXL behind the few verbs that are used.
- `lease`: the producer's promise to keep blocks, and the word that changes before it is broken.
- `messages`, `control`: the control channel between schedulers: handshake, heartbeat, release.
- `reader`: one peer's prepared lists and the life of one READ.
- `thread`: the one thread of a worker that owns NIXL.
"""
