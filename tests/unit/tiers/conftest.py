from __future__ import annotations

from collections.abc import Iterator
from itertools import count

import pytest

from benchmarks.object_server import BUCKET
from kvferry.tiers.objects.client import BucketClient
from support.object_server import Server, s3
from support.stores import Clock, open_store

_PLACES = count()


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def store(tmp_path, clock):
    return open_store(tmp_path, capacity=1 << 20, clock=clock)


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory) -> Iterator[Server]:
    with s3(tmp_path_factory.mktemp("s3")) as running:
        yield running


@pytest.fixture
def s3_url() -> str:
    """A place on that server where nothing is yet."""
    return f"s3://{BUCKET}/test-{next(_PLACES)}/cache"


@pytest.fixture(params=["s3", "file"])
def place(request, tmp_path, s3_url):
    """A URL where nothing is yet, and the server that has it, if there is one."""
    if request.param == "file":
        return f"file://{tmp_path}", None
    return s3_url, request.getfixturevalue("s3_server")


@pytest.fixture
def bucket(place):
    """The client of that place."""
    url, server = place
    return BucketClient(url, server.options if server else {}, 4.0)
