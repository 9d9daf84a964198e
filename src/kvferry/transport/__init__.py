"""Move KV between engines: control channel, reads over NIXL, staging memory, access control.

A *producer* computed KV and offers it. A *consumer* reads it. A *lease* is the producer's promise to keep
blocks for a while.

**Control channel between schedulers.** `messages` and `redeem` define its messages. `control_server` is the
producer's end and `control_client` the consumer's end. `handshake` keeps the state of each peer. A *ticket*
is a random id that the consumer exchanges for block tables and a lease: `tickets` is the producer's side of
this, `redemptions` the consumer's side. `turns` finds finished requests whose KV a producer keeps for the
next turn of the conversation. `lease` defines how a consumer detects that blocks were reused.

**Reading worker.** `transfers` splits a read order over lanes. A `lane` is a thread with its own NIXL
`agent`. It keeps `peer_connections`. Each connection is a `connected_peer` with `prepared_routes`.
`read_plan` lists the descriptors that one order reads. `packed_read` moves the cells that are packed into
larger pieces. A cell is the unit of transfer: the largest number of tokens that divides the block sizes of
both sides.

**Worker that is read.** `exported_memory` registers its KV cache, its lease words and its `staging` area.
`gather_server` packs cells when a `gather_client` asks for them.

**Access control.** `security` and `key_file` hold the key. `listener` accepts connections: `authenticator`
checks each client, `connection_limit` limits the number of connections. `allowed_peers` and `resolver` decide
which addresses may be dialled. `metadata_validation` checks a peer's transport metadata before NIXL loads it.
`network_devices` limits the network devices on which NIXL listens, and `port_range` the ports.

`costs_file` stores the measured costs of this machine, which the planner uses to choose transfer methods.
"""
