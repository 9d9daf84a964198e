"""Check an engine's settings against this machine, with the functions that the engine uses at its start."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import platform
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from kvferry.common.errors import ConfigError
from kvferry.common.files import expanded, replace_file, user_cache
from kvferry.common.units import format_bytes, parse_size
from kvferry.connector.config import NODE, ConnectorConfig, read_tiers
from kvferry.engines.vllm.version import vllm_version
from kvferry.observe.line_file import check_line_file
from kvferry.tiers.host.settings import check_available
from kvferry.tools.plan.find import CONFIG_FILE, PARAMS_FILE, NotOnHub, hub_config
from kvferry.tools.serving.devices import vllm_is_for_cpu
from kvferry.transport.agent import LEAST_BYTES, SHARED_MEMORY
from kvferry.transport.costs import load_costs
from kvferry.transport.security import existing_keys

_TEST_ROUTE = "192.0.2.1", 9  # TEST-NET-1, RFC 5737: nothing is sent to it


class PortInUse(ConfigError):
    """Raised if a program listens on the port of an engine."""


def node_address(environment: Mapping[str, str] = os.environ) -> str:
    """Return the address on which an engine listens if its setting ``host`` is ``node``.

    This is ``VLLM_HOST_IP`` if it is set, else the address of the network interface with the default route,
    else 127.0.0.1.
    """
    if given := environment.get("VLLM_HOST_IP"):
        return given
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        try:
            sock.connect(_TEST_ROUTE)
            return str(sock.getsockname()[0])
        except OSError:
            return "127.0.0.1"


def check_listening(host: str, port: int) -> None:
    """Check that an engine on this machine can listen on a host and port now; 0 is any free port.

    Raises:
        PortInUse: another program listens there.
        ConfigError: the host is not an address of this machine, or this user may not use the port.
    """
    host = node_address() if host == NODE else "0.0.0.0" if host == "*" else host  # noqa: S104 - zmq's name
    try:
        # Without the brackets that an IPv6 address may have.
        found = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise ConfigError(
            f"host {host} cannot be resolved: {error.strerror or error}; give an address of this machine, or "
            '"node"'
        ) from error
    family, kind, number, _, place = found[0]
    with socket.socket(family, kind, number) as sock:
        # As ZeroMQ does: a port that was just closed is free.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind(place)
        except OSError as error:
            raise _cannot_listen(host, port, error) from error


def _cannot_listen(host: str, port: int, error: OSError) -> ConfigError:
    if error.errno == errno.EADDRNOTAVAIL:
        return ConfigError(
            f"host {host} is not an address of this machine; run this where the engine runs, or correct host"
        )
    if error.errno == errno.EADDRINUSE:
        return PortInUse(
            f"port {port} on {host} is in use; stop the program that listens there, unless it is this "
            "engine, or choose another port (0 for any free one)"
        )
    return ConfigError(f"cannot listen on {host} port {port}: {error.strerror}; choose another host or port")


def check_machine(config: ConnectorConfig) -> None:
    """Check that an engine with these settings can use the files, directories and memory that they name.

    Nothing is left behind: the key of this machine and the default directory of the file tier are not made.
    Object storage is not contacted.

    Raises:
        ConfigError: a file, directory or address is missing or cannot be used, or the machine has too little
            memory.
    """
    load_costs(config.costs)
    if config.transfers:
        with suppress(PortInUse):  # perhaps by the engine that this configuration is for
            check_listening(config.host, config.port)
        existing_keys(config.secret_file)
        if config.transfer_log is not None:
            check_line_file("transfer_log", config.transfer_log)
    if config.record is not None:
        check_line_file("record", config.record)
    tiers = read_tiers(config.tiers)
    if tiers is None:
        return
    if tiers.host.capacity is not None:
        check_available(parse_size(tiers.host.capacity))
    for slow in tiers.slow:
        slow.check_storage()


# For each worker of an engine that has several.
WORKER_BYTES = 64 << 20


def needed_bytes(workers: Sequence[int]) -> int:
    """Return the bytes of shared memory that engines with these numbers of workers need.

    >>> needed_bytes([1, 1]) >> 20, needed_bytes([1, 2]) >> 20
    (2, 130)
    """
    return sum(LEAST_BYTES + (count * WORKER_BYTES if count > 1 else 0) for count in workers)


def check_shared_memory(
    workers: Sequence[int],
    stat: Callable[[str], os.statvfs_result] = lambda path: os.statvfs(path),  # noqa: PLW0108 - not on Windows
) -> None:
    """Check that ``/dev/shm`` has room for engines with these numbers of workers.

    Raises:
        ConfigError: the file system is missing, cannot be written to, or is too small.
    """
    try:
        found = stat(SHARED_MEMORY)
    except OSError as error:
        raise ConfigError(
            f"{SHARED_MEMORY} cannot be used: {os.strerror(error.errno or 0)}; mount a tmpfs there, because "
            "the processes of an engine communicate through it"
        ) from error
    if found.f_flag & os.ST_RDONLY:
        raise ConfigError(f"{SHARED_MEMORY} is mounted read-only; mount a tmpfs there for writing")
    total, free = found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize
    if (needed := needed_bytes(workers)) > free:
        gibibytes = -(-(needed + total - free) // (1 << 30))
        raise ConfigError(
            f"{SHARED_MEMORY} has {format_bytes(free)} free of {format_bytes(total)}, {len(workers)} engines "
            f"with {sum(workers)} workers need {format_bytes(needed)}; remove unused files there, or enlarge "
            f"it (docker: --shm-size={gibibytes}g, Kubernetes: an emptyDir with "
            f"medium Memory at {SHARED_MEMORY})"
        )


# vLLM needs one of them: Hugging Face's or Mistral's.
_CONFIGS = (CONFIG_FILE, PARAMS_FILE)
_REMEDY = "give a folder with a checkpoint, or the id of a model, such as Qwen/Qwen3-0.6B"


def check_model(model: str) -> None:
    """Check that a model is a folder with a checkpoint, or a name on the Hugging Face hub or in its cache.

    Raises:
        ConfigError: vLLM would not find the model.
    """
    # Models of other places, such as ``s3://`` or ModelScope, are not checked.
    if "://" in model or os.environ.get("VLLM_USE_MODELSCOPE", "").lower() in ("1", "true"):
        return
    check_path(model)
    path = expanded(model)
    if path.is_dir():
        if not any((path / name).is_file() for name in _CONFIGS):
            raise ConfigError(f"the folder {model} holds no {' or '.join(_CONFIGS)}; {_REMEDY}")
    elif not path.is_file():
        try:
            hub_config(model.partition(":")[0])  # a colon precedes the quantisation of a GGUF file
        except NotOnHub as error:
            raise ConfigError(f"there is no folder {model!r} here, and {error}; {_REMEDY}") from error
        except ConfigError:
            pass  # a model without config.json, such as one of Mistral's


def check_path(model: str) -> None:
    """Check that a model that is given as a path exists and can be read.

    Raises:
        ConfigError: it does not or cannot.
    """
    if model.startswith(("/", "./", "../", "~")):
        try:
            expanded(model).stat()
        except FileNotFoundError as error:
            raise ConfigError(
                f"there is no model at {model}; give a folder that exists, or the id of a model"
            ) from error
        except OSError as error:
            raise ConfigError(
                f"the model at {model} cannot be read: {error.strerror}; give a folder that user "
                f"{os.geteuid()} may read, or the id of a model"
            ) from error


def value_of(arguments: Sequence[str], *names: str) -> str | None:
    """Return the value of an option of vLLM's API server; None if it is not given.

    >>> value_of(["--dtype=float32", "-pp", "2"], "--pipeline-parallel-size", "-pp")
    '2'
    """
    found = None
    # Of several values, the last one counts, and vLLM reads --some_flag as --some-flag.
    for index, argument in enumerate(arguments):
        flag, equals, value = argument.partition("=")
        if flag.replace("_", "-") in names:
            found = value if equals else "".join(arguments[index + 1 : index + 2])
    return found


REMEDY = "add --dtype float32 to the engine's arguments"

_PROBE = (sys.executable, "-m", "kvferry.engines.vllm.compat.cpu_attention")
_PROBE_SECONDS = 120.0
_PROCESSOR = Path("/proc/cpuinfo")
# Flag of processors on which the attention may fail. Others need no trial, which takes seconds.
_DOUBTFUL = "amx_tile"
_BFLOAT16 = (None, "auto", "bfloat16")


def signal_text(number: int) -> str:
    """Return a signal as text, such as ``signal 4 (SIGILL)``."""
    with suppress(ValueError):
        return f"signal {number} ({signal.Signals(number).name})"
    return f"signal {number}"


def check_attention(arguments: Sequence[str]) -> None:
    """Check that an engine that computes in bfloat16 works on this machine's CPU.

    Raises:
        ConfigError: the arguments choose no other dtype, and vLLM's attention over bfloat16 fails here.
    """
    if value_of(arguments, "--dtype") in _BFLOAT16 and (fault := bfloat16_fault()):
        raise ConfigError(f"{fault}; {REMEDY}")


def bfloat16_fault(run: Callable[[], int] | None = None, processor: Path = _PROCESSOR) -> str:
    """Return a sentence about how vLLM's attention over bfloat16 fails on this CPU; empty if it does not.

    The result of a trial is remembered in the user's cache directory, for this processor, kernel and vLLM.

    Args:
        run: function that computes attention in another process, and returns its exit code, or -n for signal
            n. None for vLLM's own.
        processor: file in which the kernel describes the processor.
    """
    version = vllm_version()
    with suppress(OSError):
        lines = processor.read_text().splitlines()
        about = {line for line in lines if line.startswith(("model name", "flags", "microcode"))}
        if version is None or not vllm_is_for_cpu() or _DOUBTFUL not in " ".join(about).split():
            return ""
        key = hashlib.sha256("\n".join([version, platform.release(), *sorted(about)]).encode()).hexdigest()
        code = _remembered(key, run or _compute)
        if code < 0:
            return f"vLLM's attention over bfloat16 ends an engine on this CPU with {signal_text(-code)}"
    return ""


def _compute() -> int:
    try:
        done = subprocess.run(
            _PROBE,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=_PROBE_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return 0  # an engine says more about what hangs
    return done.returncode


def _remembered(key: str, run: Callable[[], int]) -> int:
    """Return the exit code of an earlier trial, or of a new one, which is then remembered."""
    try:
        path = user_cache() / "cpu_attention.json"
        kept = json.loads(path.read_text())
        if kept["key"] == key:
            return int(kept["code"])
    except (ConfigError, OSError, ValueError, LookupError, TypeError):
        pass  # no cache, or not of this form: only a cache
    code = run()
    with suppress(ConfigError, OSError):
        path = user_cache() / "cpu_attention.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, json.dumps({"key": key, "code": code}) + os.linesep)
    return code
