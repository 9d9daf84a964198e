"""Move KV between engines: control channel, reads over NIXL, staging memory, access control.

A *producer* computed KV and offers it. A *consumer* reads it.

**Control channel between schedulers.** `messages` and `redeem` define its messages. `control_server` is the
producer's end and `control_client` the consumer's end. `handshake` keeps the state of each peer. `redeem` has
also the producer's side of redeeming, `redemptions` the consumer's side. `turns` finds earlier turns of a
conversation. `lease` defines how a consumer detects that blocks were reused.

**Reading worker.** `transfers` splits a read order over lanes. A `lane` is a thread with its own NIXL
`agent`, which it hands on with its memory (`staging`). It keeps `lane_connections`. Each connection is
a `ConnectedPeer` with `prepared_routes`. `read_plan` lists the descriptors that one order reads.
`packed_read` moves cells as images.

**Worker that is read.** `transfers` registers its KV cache, its lease words and its `staging` area.
`gather_server` packs cells when a `gather_client` asks for them.

**Access control.** `security` holds the key. `listener` accepts connections, checks each client and limits
their number. `addresses` and `resolver` decide which
addresses may be dialled. `metadata_validation` checks a peer's transport metadata before NIXL loads it.
`agent` limits the network devices on which NIXL listens.

`costs` stores the measured costs of this machine, which the planner uses to choose transfer methods.
"""
