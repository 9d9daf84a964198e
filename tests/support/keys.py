"""The CURVE keys that engines of a test share."""

from kvferry.transport.security import derive_keys

KEYS = derive_keys(b"what all engines of a test share")
OTHER_KEYS = derive_keys(b"what engines of somebody else share")
