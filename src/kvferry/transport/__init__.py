"""Move KV between engines: control channel, reads over NIXL, staging memory, access control.

A *producer* computed KV and offers it. A *consumer* reads it.

**Control channel between schedulers.** `messages` and `redeem` define its messages. `control_server` is the
producer's end, `control_client` the consumer's, with `sockets` to peers. `handshake` keeps the state of each
peer, `redeem` that of a producer's tickets, `redemptions` that of a consumer's requests. An `offer` brings a
ticket to the consumer, with its request, and the ticket's grant under a `seal`. `turns` finds earlier turns
of a conversation. `lease` defines how a consumer detects that blocks were reused.

**Reading worker.** `transfers` splits a read order over lanes. A `lane` is a thread with its own NIXL `agent`
and `lane_connections` to peers, each with `prepared_routes`. `read_plan` says what one order reads.
`segmented_read` moves cells piece by piece, as images through `staging` memory or so that `verification` can
compare them. `costs` decide between transfer methods.

**Worker that is read.** `transfers` registers its KV cache, its lease words and its `staging` area.
`gather_server` packs cells when a `gather_client` asks for them.

**Access control.** `security` holds the key. A `listener` accepts connections: it checks each client, and
limits their number. `addresses` and `resolver` decide which addresses may be dialled. `metadata` parses a
peer's transport metadata, and `metadata_validation` has `metadata_sandbox` try it, before NIXL loads it.
"""

from kvferry.common.lazy import lazy_names

__getattr__ = lazy_names(__name__, __file__)
