"""Moving bytes between engines, and agreeing on how.

- `agent`: NIXL behind the few verbs that are used.
- `lease`: the producer's promise to keep blocks, and the word that changes before it is broken.
- `messages`: what schedulers say to each other; `control_server` and `control_client`: the two ends of their
  channel; `handshake`: what is known of peers; `turns`: what a producer keeps for the next turn.
- `exposed`: the memory that peers read; `gather_server`, `gather_client`: packing it for a reader.
- `transfers`: a worker's orders, shared out among lanes; `lane`: one thread that reads; `links`, `peer`: its
  connections and their prepared lists; `read_plan`: what one order reads; `packed`: reads of packed images.
- `metadata`, `vetting`, `trial`: what peers say of their memory, checked and tried before NIXL loads it;
  `devices`: where NIXL may listen.
- `security`: who may ask; `costs`: what moving bytes costs on this machine.
"""
