"""A pair of vLLM's OpenAI-compatible servers, asked over HTTP, as users run them."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks.engine_process import resumed
from benchmarks.handover.client import Answer
from benchmarks.handover.engine import Setup, Stamps
from benchmarks.handover.measure import Handover, Result
from benchmarks.handover.server import Server, log_end, server_spec
from benchmarks.handover.server_plugins import NIXL_PLUS, WITHOUT_AMX, nixl_plus, without_amx
from benchmarks.plugins import plugin_environment
from kvferry.common.errors import ConfigError, KVFerryError, TransferError
from kvferry.tools.serving.devices import free_ports
from kvferry.tools.serving.engine import EngineSpec, EngineState
from kvferry.tools.serving.launch import Fleet, LaunchError
from kvferry.tools.serving.processes import temporary_folder
from kvferry.tools.serving.role import Role
from kvferry.tools.serving.router.bodies import decode_body, kv_params_of, prefill_body


@dataclass(slots=True)
class ServerPair:
    """A prefill and a decode server.

    Attributes:
        model: name of the model in requests.
        prefill, decode: servers.
        loaded_tokens: number of prompt tokens whose KV the decode server had loaded at the last count.
    """

    model: str
    prefill: Server
    decode: Server
    loaded_tokens: int = field(default=0, init=False)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Let both servers run until the ``with`` block ends. Pause them then."""
        with resumed(self.prefill, self.decode):
            yield

    def hand_over(self, prompts: Sequence[Sequence[int]]) -> Result:
        """Compute prompts in one server and continue them in the other. See `Pair`."""
        bodies = [_request(self.model, prompt) for prompt in prompts]
        prefilled = self.prefill.complete([prefill_body(body) for body in bodies])
        params = [_params(answer) for answer in prefilled]
        answers = self.decode.complete([decode_body(*each) for each in zip(bodies, params, strict=True)])
        self.decode.settle()
        self.prefill.settle()
        before, self.loaded_tokens = self.loaded_tokens, self.decode.loaded_tokens()
        # A connector may leave the last token of each prompt to the decode engine.
        wanted = sum(len(prompt) - 1 for prompt in prompts)
        return Result(
            Handover(tuple(Stamps(added=one.sent, answered=one.answered) for one in answers)),
            [one.parsed()["choices"][0]["token_ids"][0] for one in answers],
            self.loaded_tokens - before >= wanted,
        )


def _request(model: str, prompt: Sequence[int]) -> dict[str, Any]:
    return {
        "model": model,
        "prompt": list(prompt),
        "max_tokens": 1,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }


def _params(answer: Answer) -> dict[str, Any]:
    params = kv_params_of(answer.body)
    if params is None:
        raise TransferError("the prefill server has offered no KV (kv_transfer_params) in its answer")
    return params


@contextmanager
def server_pair(
    setup: Setup,
    *,
    spec_of: Callable[[Setup, Role, int, dict[str, str]], EngineSpec] = server_spec,
    ports_of: Callable[[int], Sequence[int]] = free_ports,
    folder_of: Callable[[str], Path] = temporary_folder,
) -> Iterator[ServerPair]:
    """Start a prefill and a decode server, and end them with the ``with`` block.

    Args:
        setup: configuration of both engines. Each gets ports of its own.
        spec_of: function that returns the specification of a server, given `setup`, its role, its port and
            its environment.
        ports_of: function that returns this number of free ports.
        folder_of: function that creates the folder of the logs, given the start of its name.

    Raises:
        ConfigError: vLLM refuses an argument.
        LaunchError: a server does not start. The message has the last lines of its log.
        TransferError: a server runs without the settings of the benchmark.
    """
    plugins = [without_amx, *([nixl_plus] if setup.connector == "nixl+" else [])]
    with _log_folder(folder_of) as folder:
        environment = plugin_environment(folder / "plugins", *plugins)
        ports = zip((Role.PREFILL, Role.DECODE), ports_of(2), ports_of(2), strict=True)
        specs = [spec_of(replace(setup, port=own), role, port, environment) for role, port, own in ports]
        with Fleet(specs, folder) as fleet:
            servers = [Server(one) for one in fleet.engines]
            try:
                _wait_ready(fleet)
                _check_plugins(fleet, setup.connector)
                yield ServerPair(str(setup.model), *servers)
            except BaseException:
                _resume(servers)
                fleet.kill()
                raise
            _resume(servers)


def _resume(servers: Sequence[Server]) -> None:
    """Resume paused servers before they are ended: their resource trackers have to free shared memory."""
    for one in servers:
        one.go_on()


@contextmanager
def _log_folder(folder_of: Callable[[str], Path]) -> Iterator[Path]:
    """Yield a folder for logs. Keep it only if an error is raised, whose message may name a log."""
    folder, keep = folder_of("kvferry-handover-"), False
    try:
        yield folder
    except KVFerryError:
        keep = True
        raise
    finally:
        if not keep:
            shutil.rmtree(folder, ignore_errors=True)


def _wait_ready(fleet: Fleet) -> None:
    try:
        fleet.wait_ready()
    except (ConfigError, LaunchError) as error:
        dead = [one for one in fleet.engines if one.state is EngineState.DEAD]
        late = [one for one in fleet.engines if one.state is EngineState.STARTING]
        ends = "\n".join(log_end(one.log_path) for one in dead or late)
        raise type(error)(f"{error}\n{ends}") from error


def _check_plugins(fleet: Fleet, connector: str) -> None:
    wanted = [WITHOUT_AMX, *([NIXL_PLUS] if connector == "nixl+" else [])]
    for one in fleet.engines:
        log = one.log_path.read_text(errors="replace")
        if missing := [sign for sign in wanted if sign not in log]:
            raise TransferError(f"{one.spec.name} does not say {missing[0]!r} (log: {one.log_path})")
