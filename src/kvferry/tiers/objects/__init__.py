"""The object tier, which keeps chunk files in object storage that many machines share.

`tier` is the entry point, and `settings` its configuration. `client` makes requests with a deadline,
`options` and `endpoint` define the client's settings, and `stream` reads an object in pieces. `faults`
explains failed requests, and `access` pauses requests to a store that keeps failing, with a
`circuit_breaker`. `bucket_index` lists the chunks, and `distrusted` remembers bad ones. `admin` implements
operator commands.
"""
