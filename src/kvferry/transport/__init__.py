"""Move bytes between engines, and agree on how.

**Peers find each other.** `messages` and `redeem` define the control channel. `control_server` answers on it,
`control_client` asks on it. `handshake` keeps the state of peers, `tickets` and `redemptions` the two ends of
an offer, `turns` the earlier turns that a producer keeps. `lease` defines how long blocks may be read.

**A worker reads.** `transfers` splits an order over lanes. A `lane` is one thread with one NIXL `agent`. It
keeps `peer_connections`, each a `connected_peer` with `prepared_routes`. `read_plan` is what one order reads,
and `packed_read` moves the cells that travel packed.

**A worker is read.** `exported_memory` registers its cache, lease words and `staging` area. `gather_server`
packs cells on request of a `gather_client`.

**Who may.** `security` and `key_file` hold the key. `listener` accepts connections: `authenticator` checks
each client, `connection_limit` bounds them, and `allowed_peers` and `resolver` decide which addresses may be
dialled. `metadata_validation` checks a peer's transport metadata before NIXL loads it. `network_devices`
limits where NIXL listens.

`costs_file` holds the measured costs of this machine, from which transfers are planned.
"""
