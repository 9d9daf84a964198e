"""A router holds nothing of requests that are over, however they ended, and its heap has few holes."""

from __future__ import annotations

import ctypes
import gc
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from urllib.parse import urlsplit

import pytest

from support.waiting import wait_for

pytestmark = pytest.mark.slow

_KEPT = ("kvferry.tools.serving", "httpx", "httpcore", "h11", "uvicorn", "starlette", "anyio")
_ROUNDS = 5


HEAP = """
import ctypes
from kvferry.tools.serving import run
from kvferry.tools.serving.devices import listen
from kvferry.tools.serving.router.app import RouterApp
from kvferry.tools.serving.router.settings import RouterSettings

class Information(ctypes.Structure):
    _names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
    _fields_ = [(name, ctypes.c_size_t) for name in _names.split()]

libc = ctypes.CDLL(None)
libc.mallinfo2.restype = Information
libc.malloc.restype = ctypes.c_void_p
libc.free.argtypes = [ctypes.c_void_p]
app = RouterApp(RouterSettings(prefill=(), decode=("http://127.0.0.1:1",)))
run.run_app(app, listen("127.0.0.1", 0), lambda: False)
libc.free(libc.malloc(16 << 20))
before = libc.mallinfo2().hblks
for _ in range(100):
    libc.malloc(256 << 10)
print(libc.mallinfo2().hblks > before)
"""
"""Says whether pieces that asyncio reads into are mapped each, after a larger piece was freed.

The first pieces may fit into holes that the imports left in the heap; a hundred do not.
"""


def held() -> Counter[str]:
    """Objects of the router, its server and its client, by type."""
    gc.collect()
    names = (f"{type(one).__module__}.{type(one).__qualname__}" for one in gc.get_objects())
    return Counter(name for name in names if name.startswith(_KEPT))


def leave(url: str, raw: bytes, after: int) -> None:
    """Send these bytes, read so many at least, and leave."""
    parts = urlsplit(url)
    with socket.create_connection((parts.hostname, parts.port)) as sock:
        sock.sendall(raw)
        heard = 0
        while heard < after and (piece := sock.recv(64)):
            heard += len(piece)


def post(body: bytes, length: int | None = None) -> bytes:
    """A completion as it goes over the wire."""
    size = len(body) if length is None else length
    return b"POST /v1/completions HTTP/1.1\r\nhost: r\r\ncontent-length: %d\r\n\r\n%s" % (size, body)


@pytest.fixture
def few_objects() -> Iterator[None]:
    """Hide the objects of other tests, so that looking at all objects is quick."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def test_router_holds_no_objects_of_requests_that_are_over(few_objects, stage, fake, kv):
    quiet = {"probe_seconds": 3600.0}
    scene = stage([fake(hands_over=kv)], [fake()], **quiet)
    cut = stage([fake(hands_over=kv)], [fake(dies_after=1)], **quiet)
    slow = stage([fake(hands_over=kv)], [fake(event_seconds=0.5)], **quiet)
    failing = stage([fake(status=500)], [fake(status=503)], **quiet)
    stream = b'{"model": "m", "prompt": "x", "stream": true}'

    def round_of_all_kinds() -> None:
        assert scene.complete().status_code == 200
        assert scene.complete(stream=True).content.endswith(b"[DONE]\n\n")
        assert scene.client.get("/v1/models").status_code == 200
        assert scene.client.get("/metrics").status_code == 200
        assert scene.client.get("/nothing").status_code == 404
        for raw in (b"{", b"[]", b'{"prompt": "\xff"}'):
            assert scene.client.post("/v1/completions", content=raw).status_code == 400
        assert b"engine_failed" in cut.complete(stream=True).content
        assert failing.complete().status_code == 503
        url = str(scene.client.base_url)
        leave(url, post(b"half", 100), 0)
        leave(url, b"", 0)
        leave(url, b"\x16\x03\x01\r\n\r\n", 1)
        leave(str(slow.client.base_url), post(stream), 1)  # in the middle of a stream

    round_of_all_kinds()
    before = [held()]

    def same_twice() -> bool:
        before.append(held())
        return before[-1] == before[-2]

    wait_for(same_twice)  # connections end in their own time
    most = before[-1]
    for _ in range(_ROUNDS):
        round_of_all_kinds()
    wait_for(lambda: not held() - most)


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="of glibc since 2.33")
def test_read_buffers_of_sockets_are_mapped_outside_the_heap():
    done = subprocess.run(
        [sys.executable, "-c", HEAP], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stdout == "True\n", done.stderr
