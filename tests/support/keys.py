"""The CURVE keys that engines of a test share."""

from kvferry.transport.security import derive

KEYS = derive(b"what all engines of a test share")
OTHER_KEYS = derive(b"what engines of somebody else share")
