"""The engines of the soak: a single one without kvferry, and a pair with tiers behind the router."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from kvferry.tools.serving.devices import free_ports, visible_devices
from kvferry.tools.serving.engine import EngineSpec, EngineState
from kvferry.tools.serving.launch import Fleet, death_notice, fleet_specs
from kvferry.tools.serving.role import Role

_ENGINE = (
    "--enforce-eager",
    "--dtype=float32",
    "--max-model-len=1024",
    f"--kv-cache-memory-bytes={64 << 20}",
    "--max-num-seqs=8",
    # A line for every request would hide logs that grow by themselves.
    "--disable-uvicorn-access-log",
)
_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TORCH_COMPILE_DISABLE": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    # By default vLLM's matrix products keep 1,024 kernels, one for each shape of weights and number of tokens
    # in a step. With the fragments that evicted ones leave, they grow for most of an hour.
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "16",
}
_ROUTER_SECONDS = 30.0


@dataclass(frozen=True)
class Pair:
    """A pair that serves.

    Attributes:
        fleet: the prefill engine and the decode engine.
        router: its process.
        url: of the router.
        logs: folder of all three.
    """

    fleet: Fleet
    router: subprocess.Popen[bytes]
    url: str
    logs: Path

    @property
    def pids(self) -> dict[str, int]:
        """Processes, which have others below them, by name."""
        engines = {engine.spec.name: engine._guard.pid for engine in self.fleet.engines}
        return {**engines, "router": self.router.pid}

    def deaths(self) -> list[str]:
        """Return a sentence about each process that has ended."""
        dead = [death_notice(one) for one in self.fleet.engines if one.poll() is EngineState.DEAD]
        if (code := self.router.poll()) is not None:
            dead.append(f"the router ended with exit code {code}")
        return dead


@contextmanager
def single(model: str, logs: Path) -> Iterator[str]:
    """One engine without kvferry; its URL."""
    spec = EngineSpec(
        name="single",
        role=Role.BOTH,
        model=model,
        port=free_ports(1)[0],
        arguments=_ENGINE,
        environment=_ENVIRONMENT,
    )
    with Fleet([spec], logs) as fleet:
        fleet.wait_ready()
        yield spec.url


@contextmanager
def pair(model: str, folder: Path) -> Iterator[Pair]:
    """A pair with tiers behind the router; its chunks and logs lie in the folder."""
    (folder / "chunks").mkdir(parents=True)
    tiers = [
        {"type": "host", "capacity": "64MiB"},
        {"type": "file", "path": str(folder / "chunks"), "capacity": "256MiB"},
    ]
    settings = {"tiers": tiers, "chunk_tokens": 64, "lease_seconds": 10.0}
    specs = fleet_specs(
        model,
        prefill_settings=settings,
        decode_settings={**settings, "turn_seconds": 5.0},
        arguments=_ENGINE,
        machine=visible_devices(),
    )
    specs = tuple(replace(spec, environment={**spec.environment, **_ENVIRONMENT}) for spec in specs)
    with Fleet(specs, folder / "logs") as fleet:
        fleet.wait_ready()
        with _router(fleet.prefill_urls[0], fleet.decode_urls[0], folder / "logs" / "router.log") as (
            router,
            url,
        ):
            yield Pair(fleet, router, url, folder / "logs")


@contextmanager
def _router(prefill: str, decode: str, log: Path) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    command = [
        sys.executable,
        "-c",
        "from kvferry.tools.cli.main import main; main()",
        "router",
        "--port",
        "0",
    ]
    command += ["--min-prefill-tokens", "0"]  # every request tests a hand-over
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*command, "--prefill", prefill, "--decode", decode], stdout=output, stderr=subprocess.STDOUT
        )
    try:
        yield process, _served_at(process, log)
    finally:
        process.terminate()
        process.wait(_ROUTER_SECONDS)


def _served_at(process: subprocess.Popen[bytes], log: Path) -> str:
    until = time.monotonic() + _ROUTER_SECONDS
    while "/v1\n" not in (text := log.read_text()):
        if process.poll() is not None or time.monotonic() > until:
            raise SystemExit(f"the router does not serve: {text}")
        time.sleep(0.1)
    return text.split()[-1].removesuffix("/v1")
