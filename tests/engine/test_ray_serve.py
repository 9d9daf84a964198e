"""`examples/ray_serve` on two Ray nodes of this machine: requests go on while replicas and engines end."""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import httpx
import pytest

from kvferry.tools.serving.devices import free_ports
from kvferry.tools.serving.tiny import tiny_checkpoint
from support.apart import apart, needs
from support.fronts import Engines, answer, answers, bodies
from support.waiting import wait_for

RAY = str(apart("ray"))
pytestmark = [
    pytest.mark.engine,
    pytest.mark.long,
    pytest.mark.timeout(900),
    needs("ray"),
]

ROOT = Path(__file__).parents[2]
_ON_A_CPU = re.findall(r"^ +arguments: \[(.*)\]$", (ROOT / "docs/start/ray.md").read_text(), re.MULTILINE)[-1]
ENGINE = (*_ON_A_CPU.split(", "), "--max-num-seqs=8")
"""Arguments of the page for a machine without GPUs."""
SECONDS = 300
"""Longest wait for a replica or an answer: engines that start keep all cores busy."""


@dataclass(frozen=True)
class App:
    """The running application: its URL, and the engines' model and transfer log."""

    url: str
    model: str
    log: Path

    def replicas(self) -> dict[str, list]:
        """Return running replicas, by deployment."""
        from ray import serve

        deployments = serve.status().applications["default"].deployments
        return {name: each.replica_states for name, each in deployments.items()}


@pytest.fixture(scope="module")
def app(running, checkpoints: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[App]:
    running.close()
    log = tmp_path_factory.mktemp("ray") / "transfers.jsonl"
    model = str(tiny_checkpoint("qwen3", checkpoints))
    sys.path.insert(0, RAY)
    paths = [RAY, str(ROOT / "src"), str(ROOT)]
    os.environ |= {
        "PYTHONPATH": os.pathsep.join(paths),
        "RAY_USAGE_STATS_ENABLED": "0",
        "TORCH_COMPILE_DISABLE": "1",
        "OMP_NUM_THREADS": "1",
        # Otherwise vLLM binds the threads of every engine to the same cores.
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    }
    import ray
    from ray import serve
    from ray.cluster_utils import Cluster

    from examples.ray_serve.app import build

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2})
    try:
        cluster.add_node(num_cpus=2)
        ray.init(address=cluster.address, log_to_driver=False)
        (port,) = free_ports(1)
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        serve.run(
            build(
                {
                    "model": model,
                    "decode": 2,
                    "arguments": ENGINE,
                    "settings": {"transfer_log": str(log)},
                }
            )
        )
        yield App(f"http://127.0.0.1:{port}", model, log)
        serve.shutdown()
    finally:
        ray.shutdown()
        cluster.shutdown()


def test_answers_are_those_of_one_engine_and_their_kv_is_moved(app):
    asked = bodies(app.model, "ray", 32)
    got = answers(app.url, asked)
    moved = Engines(app.model, "", "", app.log).transfers()
    assert [each["outcome"] for each in moved] == ["ready"] * 32
    alone = answers(app.url, [(path, {**body, "cache_salt": "alone"}) for path, body in asked])
    assert got == alone


def guard_of(app: App, name: str) -> int | None:
    """Return the process id of the guard of one engine of a deployment; None if it ends meanwhile."""
    from ray import serve
    from ray.exceptions import RayActorError

    try:
        return serve.get_deployment_handle(name, "default").engine_pid.remote().result()
    except RayActorError:
        return None


@pytest.mark.parametrize("role", ["decode", "prefill"])
def test_requests_go_on_while_a_replica_whose_engine_died_is_started_again(app, role):
    failed, served, ended = [], [], threading.Event()

    def ask() -> None:
        for number in count():
            if ended.is_set():
                return
            try:
                with httpx.Client(base_url=app.url, timeout=SECONDS, trust_env=False) as client:
                    path, body = bodies(app.model, f"{role} {number}", 4)[number % 4]
                    served.append(answer(client, path, body))
            except (httpx.HTTPError, AssertionError) as error:
                failed.append(repr(error))
            ended.wait(0.2)

    asker = threading.Thread(target=ask)
    asker.start()
    try:
        victim = guard_of(app, role)
        os.killpg(victim, signal.SIGKILL)
        # Its replica fails the next health check.
        wait_for(
            lambda: {victim, None}.isdisjoint(guard_of(app, role) for _ in range(4)) and healthy(app), SECONDS
        )
        ended.wait(2)
    finally:
        ended.set()
        asker.join()
    assert failed == []
    assert len(served) >= 3


def healthy(app: App) -> bool:
    """Return whether all replicas run."""
    return all(set(states) == {"RUNNING"} for states in app.replicas().values())
