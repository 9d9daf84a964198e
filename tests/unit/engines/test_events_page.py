"""The program on the page about KV events prints what vLLM publishes."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
from pathlib import Path

import msgspec
import zmq
from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVEventBatch

PAGE = Path(__file__).parents[3] / "docs" / "events.md"
ENDPOINT = "tcp://127.0.0.1:5557"


def batch() -> bytes:
    stored = BlockStored(
        block_hashes=[b"a", b"b"],
        parent_block_hash=None,
        token_ids=[1, 2],
        block_size=1,
        lora_id=None,
        medium="STORAGE",
        lora_name=None,
        group_idx=1,
        ownership="file",
    )
    removed = BlockRemoved(block_hashes=[b"a"], medium="GPU", group_idx=0)
    return msgspec.msgpack.encode(KVEventBatch(ts=0.0, events=[stored, removed, AllBlocksCleared()]))


def publish(socket: zmq.Socket, ended: threading.Event) -> None:
    while not ended.wait(0.05):  # a subscription takes a moment to arrive
        socket.send_multipart((b"", b"", batch()))


def test_the_program_prints_a_line_per_event() -> None:
    (program,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert program.count(ENDPOINT) == 1
    context, ended = zmq.Context(), threading.Event()
    with context, context.socket(zmq.PUB) as socket:
        socket.linger = 0
        port = socket.bind_to_random_port("tcp://127.0.0.1")
        publisher = threading.Thread(target=publish, args=(socket, ended))
        publisher.start()
        program = program.replace(ENDPOINT, f"tcp://127.0.0.1:{port}")
        with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as printing:
            try:
                lines = [printing.stdout.readline().strip() for _ in range(3)]
            finally:
                printing.kill()
                ended.set()
                publisher.join()
    assert lines == ["BlockStored file 1 2", "BlockRemoved GPU 0 1", "AllBlocksCleared None None 0"]
