"""A child process that tries a peer's transport metadata before this process loads it.

NIXL and UCX crash on invalid metadata: an assertion fails, or they access memory past an array. The child
loads the metadata like a lane, reads a few bytes of each registered host region and one lease word, and
removes the peer. A child that dies, hangs or fails is replaced.

The child is a new Python process, so it shares no memory with the engine. It sees no GPU, because it would
otherwise take GPU memory. It loads the keys of GPU memory but does not read that memory.
"""

from __future__ import annotations

import importlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

import kvferry
from kvferry.common.errors import TransferError
from kvferry.common.machine import die_with_parent, resource
from kvferry.geometry import Region
from kvferry.transport.addresses import PortRange
from kvferry.transport.agent import Agent, ReadState, nixl_package, ucx_environment
from kvferry.transport.messages import WORD_BYTES
from kvferry.transport.metadata import MemoryCard, parse_metadata

# Timeout for the child to start. It is long, because other processes may use the cores.
START_SECONDS = 60.0

MAX_READS = 1024  # maximum number of regions of a worker that the child reads from

_ENVIRONMENT = {
    "CUDA_VISIBLE_DEVICES": "",
    "HIP_VISIBLE_DEVICES": "",
    "UCX_HANDLE_ERRORS": "none",
    "NIXL_LOG_LEVEL": "FATAL",
    "UCX_LOG_LEVEL": "fatal",
    "OMP_NUM_THREADS": "1",
}
_STALL_SECONDS = 1.0
_MOST_BYTES = 64 << 20
_MOST_SAID = 500
_LOOK_SECONDS = 0.5  # seconds between two looks at whether the child process is stopped

_STOPPED = "the process that tries transport metadata was stopped (SIGSTOP); a new one takes its place"

_POLL_SECONDS = 2e-4


class _TrialRequest(msgspec.Struct, frozen=True, array_like=True):
    """A request to load metadata, and read its memory and a word whose high half must be the incarnation."""

    agent: bytes
    words_address: int
    incarnation: int


class MetadataSandbox:
    """A child process that tries the transport metadata of peers.

    Only the thread that starts the child may use this object. The child ends when that thread ends.
    """

    def __init__(
        self,
        host: str,
        ports: PortRange | None = None,
        start: Callable[..., subprocess.Popen[bytes]] = subprocess.Popen,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start the child process, whose UCX uses only devices with this address and these ports."""
        self._clock = clock
        ours, theirs = socket.socketpair()
        self._process = start(
            # -P: a module in the engine's working directory must not shadow another.
            [sys.executable, "-P", "-m", __name__, str(theirs.fileno()), str(os.getpid()), nixl_package()],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={**os.environ, **_ENVIRONMENT, **ucx_environment(host, ports), "PYTHONPATH": _python_path()},
        )
        theirs.close()
        self._connection: Connection[Any, Any] = Connection(ours.detach())
        self._ready = False

    @property
    def pid(self) -> int:
        return self._process.pid

    def wait_ready(self, seconds: float = START_SECONDS) -> str:
        """Wait until the child is ready or stopped; return an error message, empty if it is ready."""
        try:
            if not self._ready and self._poll(seconds):
                self._ready = bool(self._connection.recv_bytes())
        except (EOFError, OSError):
            return f"the process that tries transport metadata ended as it started ({self._how()})"
        if not self._ready and self._is_stopped():
            return _STOPPED
        late = (
            f"the process that tries transport metadata did not start in {seconds:g} s; are there more "
            "busy processes on this machine than cores?"
        )
        return "" if self._ready else late

    def run_trial(self, card: MemoryCard, seconds: float) -> str:
        """Make the child load a worker's metadata and read its memory; return why it failed, or "".

        After a failure, `kill` the child, which may be damaged. If this process did not run for a while, wait
        for `seconds` a second time. A stopped child (SIGSTOP) is not waited for.
        """
        try:
            self._connection.send_bytes(encode_trial(card))
            if not self._replies_within(max(seconds, 0.0)):
                if self._is_stopped():
                    return _STOPPED
                return "the process that tried its transport metadata did not come to an end"
            return self._connection.recv_bytes(_MOST_BYTES).decode()[:_MOST_SAID]
        except (EOFError, OSError):
            return f"its transport metadata ended the process that tried it ({self._how()})"

    def _replies_within(self, seconds: float) -> bool:
        began = self._clock()
        if self._poll(seconds):
            return True
        # Whoever stopped this process, or the whole machine, has stopped the child as well. If the child is
        # killed while it connects, the peer's UCX logs an error: it connects back to the child's port.
        stalled = self._clock() - began > seconds + _STALL_SECONDS
        return stalled and self._poll(seconds)

    def _poll(self, seconds: float) -> bool:
        """Wait until the child sends a message, at most `seconds`, or until it is found stopped twice."""
        stopped = False
        while seconds > _LOOK_SECONDS:
            if self._connection.poll(_LOOK_SECONDS):
                return True
            # Whoever continues a whole process group may continue this process before the child.
            before, stopped = stopped, self._is_stopped()
            if before and stopped:
                return False
            seconds -= _LOOK_SECONDS
        return self._connection.poll(seconds)

    def _is_stopped(self) -> bool:
        try:
            return os.waitid(os.P_PID, self.pid, os.WSTOPPED | os.WNOHANG | os.WNOWAIT) is not None
        except ChildProcessError:
            return False  # it has ended

    def kill(self) -> None:
        self._connection.close()
        self._process.kill()
        self._process.wait()

    def _how(self) -> str:
        try:
            code = self._process.wait(1.0)
        except subprocess.TimeoutExpired:
            return "it closed its channel"
        return f"signal {-code}" if code < 0 else f"exit code {code}"


def encode_trial(card: MemoryCard) -> bytes:
    """Encode the request to try a worker's metadata. It contains all that the result depends on."""
    return msgspec.msgpack.encode(_TrialRequest(card.agent, card.words_address, card.incarnation))


def _python_path() -> str:
    here = str(Path(kvferry.__file__).parents[1])
    return os.pathsep.join([here, *filter(None, [os.environ.get("PYTHONPATH")])])


def _try(
    agent: Agent, landing: Region, landed: np.ndarray[Any, np.dtype[np.uint64]], asked: _TrialRequest
) -> str:
    found = parse_metadata(asked.agent).regions
    regions = [region for region in found if region.memory == "DRAM"][:MAX_READS]
    addresses = [asked.words_address, *(region.address for region in regions)]
    lengths = [WORD_BYTES, *(min(WORD_BYTES, region.length) for region in regions)]
    there = np.array([(a, n, n, 1) for a, n in zip(addresses, lengths, strict=True)], np.int64)
    here = there.copy()
    here[:, 0] = landing.address + WORD_BYTES * np.arange(len(there))
    numbers = np.arange(len(there), dtype=np.int32)
    landed[0] = 0  # the word of the trial before must not pass for this one
    name = agent.add_peer(asked.agent)
    ours = agent.prepare(None, landing, here)
    theirs = agent.prepare(name, Region(addresses[0], WORD_BYTES), there)
    handle = agent.transfer("READ", ours, numbers, theirs, numbers)
    state = agent.post(handle)
    while state is ReadState.IN_FLIGHT:
        time.sleep(_POLL_SECONDS)
        state = agent.state(handle)
    if state is ReadState.FAILED:
        return "the memory that its transport metadata names cannot be read"
    agent.release(handle)
    for prepared in (ours, theirs):
        agent.release_list(prepared)
    agent.drop_peer(name)
    if int(landed[0]) >> 32 != asked.incarnation:
        return "its transport metadata leads to memory of another process, or of another run of it"
    return ""


def main(arguments: list[str]) -> None:
    """Run the child. Arguments: descriptor of the connection, parent's process id, package of NIXL."""
    die_with_parent()
    if os.getppid() != int(arguments[1]):  # the parent ended before
        return
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # metadata of a peer must not fill the disk with cores
    # ``import nixl`` may load torch to find out which package to use. That takes seconds and 100 MiB.
    sys.modules["nixl"] = importlib.import_module(arguments[2])
    connection: Connection[Any, Any] = Connection(int(arguments[0]))
    agent = Agent(f"trial/{os.getpid()}/{time.monotonic_ns():x}", progress=False)
    landed = np.zeros(1 + MAX_READS, np.uint64)
    landing = Region(int(landed.ctypes.data), landed.nbytes)
    agent.register([landing])
    connection.send_bytes(b"ready")
    while True:
        try:
            asked = msgspec.msgpack.decode(connection.recv_bytes(_MOST_BYTES), type=_TrialRequest)
        except (EOFError, OSError):
            break
        try:
            reason = _try(agent, landing, landed, asked)
        except TransferError as error:
            reason = str(error)
        except Exception as error:  # noqa: BLE001 - the transport's own exceptions
            reason = f"the transport cannot use its metadata: {error}"
        connection.send_bytes(reason.encode())
    os._exit(0)  # a normal exit would wait for peers, in NIXL


if __name__ == "__main__":
    main(sys.argv[1:])
