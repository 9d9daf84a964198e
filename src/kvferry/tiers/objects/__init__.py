"""The object tier: the same chunk files in object storage that many machines share.

`options` defines the settings of the client, `client` makes requests with a deadline, `faults` explains
requests that failed, `access` stops asking a store that keeps failing, `bucket_index`
lists chunks, and `distrusted` remembers bad ones.
"""
