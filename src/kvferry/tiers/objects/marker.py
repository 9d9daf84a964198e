"""The marker of encrypted chunks under a URL: an object that says that all chunks there are encrypted.

Where chunks are not encrypted, there is no marker.
"""

from __future__ import annotations

import json

from kvferry.tiers.objects.client import BucketClient
from kvferry.tiers.objects.faults import Fault
from kvferry.tiers.paths import ENCRYPTION_MARKER, entry_kind

_SIGNATURE = "object tier"
_CONTENT = json.dumps({"encryption": 1, "kvferry": _SIGNATURE}, indent=1, sort_keys=True) + "\n"
_MOST_BYTES = 4096


def find_conflict(bucket: BucketClient, *, encrypted: bool) -> Fault | None:
    """Return why a tier must not use a URL: its chunks are encrypted and the tier's are not, or vice versa.

    Raise Unavailable if a request fails.
    """
    if _is_marked(bucket):
        return None if encrypted else Fault.ENCRYPTED
    if not encrypted or not any(entry_kind(one.path) for page in bucket.list() for one in page):
        return None
    # Another engine may have marked an empty URL, and stored chunks there, since the first look.
    return None if _is_marked(bucket) else Fault.NOT_ENCRYPTED


def write_marker(bucket: BucketClient) -> None:
    """Mark the chunks under a URL as encrypted, unless they are. Raise Unavailable if a request fails."""
    if not _is_marked(bucket):
        bucket.put(ENCRYPTION_MARKER, [_CONTENT.encode("ascii")])


def _is_marked(bucket: BucketClient) -> bool:
    try:
        # The content, because some servers have an answer for any name.
        found = json.loads(bucket.get(ENCRYPTION_MARKER).read(0, _MOST_BYTES))
        return bool(found["kvferry"] == _SIGNATURE)
    except (FileNotFoundError, ValueError, KeyError, TypeError, RecursionError):
        return False
