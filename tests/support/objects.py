"""Object stores, and the chunks that tests keep in them."""

from __future__ import annotations

import logging

from kvferry.tiers.files.chunk_file import whole_pages
from kvferry.tiers.format.chunk import ChunkGroup
from kvferry.tiers.names import GetOutcome, PutOutcome
from kvferry.tiers.objects.tier import ObjectTier
from support.chunk_files import key
from support.object_server import Server
from support.stores import GROUP, NAMESPACE, body, sections


def open_objects(url: str, server: Server | None = None, **options) -> ObjectTier:
    """A store that lists whenever it is told to."""
    client = options.pop("options", server.options if server else {})
    options = {"listing_seconds": 0.0, "timeout_seconds": 4.0, "pause_seconds": 30.0, **options}
    namespace = options.pop("namespace", NAMESPACE)
    return ObjectTier(url, namespace, client, **options)


def put(store: ObjectTier, number: int, group: ChunkGroup = GROUP) -> PutOutcome:
    return store.put(key(number), group, body(number, group))


def get(store: ObjectTier, number: int, group: ChunkGroup = GROUP) -> GetOutcome:
    """Fetch the chunk of a number; a hit with other bytes than were stored fails the test."""
    right = body(number, group)
    into = whole_pages(len(right))
    done = store.get(key(number), group, into)
    assert done is not GetOutcome.HIT or sections(group, into) == sections(group, right)
    return done


def known(store: ObjectTier, *numbers: int) -> list[bool]:
    return store.contains([key(number) for number in numbers]).tolist()


def warnings(caplog) -> list[str]:
    """What was said so far."""
    return [one.getMessage() for one in caplog.records if one.levelno == logging.WARNING]
