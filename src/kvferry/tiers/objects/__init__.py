"""The object tier: the same chunk files in object storage that many machines share.

`options` defines the settings of the client, `client` makes requests with a deadline, `faults` explains
failed requests, `access` pauses requests to a store that keeps failing, `bucket_index` lists chunks, and
`distrusted` remembers bad ones.
"""
