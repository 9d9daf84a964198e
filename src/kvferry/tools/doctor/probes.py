"""Checks that run in a separate process: `python -m kvferry.tools.doctor.probes WHAT [ARGUMENTS]`.

Each check prints JSON lines. `parse_output` can read those that were printed before a crash.

- ``nixl``: list and start NIXL's plugins; ``reads``: time READs between two processes;
- ``connector``: load the connector in vLLM; ``path``: test a directory;
- ``twins``: find paths that are the same directory.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from kvferry.common.errors import KVFerryError

MODULE = "kvferry.tools.doctor.probes"
# Before each line, because libraries print to standard output, too.
_MARK = "kvferry doctor: "
_READ_BYTES = 32 << 20
_SMALL, _LARGE = 4096, 2 << 20
_MOST_DESCRIPTORS = 2048
_ROUNDS = 7
_TIMED_SECONDS = 10.0


def parse_output(out: str) -> list[dict[str, Any]]:
    """Return the JSON objects that a check in another process printed, in the order of printing."""
    found = []
    for line in out.splitlines():
        _, mark, text = line.partition(_MARK)  # libraries leave unfinished lines before it
        if mark:
            with suppress(ValueError):  # an incomplete line
                found.append(json.loads(text))
    return found


def _print_result(**what: Any) -> None:
    print(f"{_MARK}{json.dumps(what)}", flush=True)  # noqa: T201 - the parent reads it


def nixl() -> None:
    """Print NIXL's version, then start its plugins one by one, and print whether each starts."""
    from importlib.metadata import version  # noqa: PLC0415

    from kvferry.transport import make_nixl_agent, preload  # noqa: PLC0415 - loads NIXL

    _print_result(version=version("nixl"), verbs=preload())
    # UCX first: it is the only plugin that kvferry needs, and another may crash the process.
    plugins = sorted(make_nixl_agent("doctor", [], progress=False).plugin_list)
    for plugin in sorted(plugins, key=lambda name: (name != "UCX", name)):
        _print_result(trying=plugin)  # it may crash the process
        try:
            agent = make_nixl_agent(f"doctor-{plugin}", [plugin], progress=False)
            why = "" if plugin in agent.backends else "it does not start"
        except Exception as error:  # noqa: BLE001 - after any exception the plugin does not start
            why = str(error) or type(error).__name__
        _print_result(plugin=plugin, why=why)


def reads(device: str = "cpu") -> None:
    """Time READs between two processes, with small and with large descriptors, and print the times."""
    import numpy as np  # noqa: PLC0415

    from kvferry.tools.measuring.gpus import source_and_destination  # noqa: PLC0415 - loads torch
    from kvferry.tools.measuring.producer_process import ProducerProcess  # noqa: PLC0415
    from kvferry.tools.measuring.raw_reads import RawReads  # noqa: PLC0415
    from kvferry.tools.measuring.reader import Reader  # noqa: PLC0415
    from kvferry.tools.measuring.rounds import machine_facts  # noqa: PLC0415
    from kvferry.tools.measuring.simulated import plain_engine  # noqa: PLC0415 - loads torch
    from kvferry.transport import TransferSettings  # noqa: PLC0415

    _print_result(machine=asdict(machine_facts()))
    there, here = source_and_destination(device)
    src, dst = plain_engine("source", _READ_BYTES, there), plain_engine("destination", _READ_BYTES, here)
    with (
        ProducerProcess([src], {}) as producer,
        Reader(dst, producer, settings=TransferSettings(lanes=1)) as reader,
        closing(RawReads(reader)) as raw,
    ):
        for size in (_SMALL, _LARGE):
            lists = raw.equal_descriptors(min(_READ_BYTES, size * _MOST_DESCRIPTORS), size)
            # The first READ sets up the connection, so it is not counted.
            seconds = [raw.read(lists) for _ in range(_ROUNDS + 1)][1:]
            _print_result(
                descriptors=len(lists.indices.src), bytes=lists.bytes, seconds=float(np.median(seconds))
            )
        # On a busy machine, orders do not wait until the lane knows the speed of READs.
        until = time.monotonic() + _TIMED_SECONDS
        while not reader.figures(src).read_bytes_per_second and time.monotonic() < until:
            pass
        found = reader.figures(src)
        _print_result(strategy="+".join(found.strategies_by_group[0]), not_shared=found.not_shared)


def connector() -> None:
    """Import the connector in the way that an engine does.

    Print vLLM's version, its device type, and whether connector and platform support the hybrid KV cache
    manager. On a CPU, also compute attention over bfloat16, and print the name of the instructions.
    """
    import vllm  # noqa: PLC0415 - slow, and its import is checked here

    _print_result(version=vllm.__version__)
    from vllm.platforms import current_platform  # noqa: PLC0415

    from kvferry.engines.vllm import KVFerryConnector, SupportsHMA  # noqa: PLC0415

    _print_result(
        connector=issubclass(KVFerryConnector, SupportsHMA),
        platform=bool(current_platform.support_hybrid_kv_cache()),
        device=str(current_platform.device_type),
    )
    if current_platform.is_cpu():
        from kvferry.engines.vllm import compute_attention  # noqa: PLC0415

        _print_result(trying="attention")
        _print_result(attention=compute_attention())


def path(where: str) -> None:
    """Print a directory's owner, free space and encryption, and whether files can be written and locked.

    If a file tier could not use the directory, print only its real path and the reason.
    """
    from kvferry.tiers import (  # noqa: PLC0415
        OUT_OF_ROOM,
        DiskRoom,
        check_directory,
        read_ledger,
        shortage,
        try_directory,
    )

    _print_result(real=os.path.realpath(where))
    try:
        encrypted = check_directory(where)
    except KVFerryError as error:
        _print_result(refused=str(error))
        return
    status = Path(where).stat()
    _print_result(
        owner=status.st_uid,
        mode=status.st_mode & 0o777,
        free=DiskRoom.of(where).free,
        ledger=read_ledger(where),
        encrypted=encrypted,
    )
    try:
        direct = try_directory(where)
    except OSError as error:
        failed, advice = os.strerror(error.errno or 0), ""
        if error.errno in OUT_OF_ROOM:
            lacking, advice = shortage(where, error)
            failed += f": {lacking}"
        _print_result(failed=failed, number=error.errno, advice=advice)
    else:
        _print_result(direct=direct)


def twins(*paths: str) -> None:
    """Print each path of a directory with the first earlier one that is the same; null if there is none."""
    from kvferry.tiers import find_same_directory  # noqa: PLC0415

    for number, path in enumerate(paths):
        _print_result(path=path, twin=find_same_directory(path, paths[:number]))


if __name__ == "__main__":
    _WHAT: dict[str, Callable[..., None]] = {
        "nixl": nixl, "reads": reads, "connector": connector, "path": path, "twins": twins
    }  # fmt: skip
    _WHAT[sys.argv[1]](*sys.argv[2:])
