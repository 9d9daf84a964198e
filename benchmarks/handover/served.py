"""A pair of vLLM's OpenAI-compatible servers, asked over HTTP, as users run them."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks.handover.cores import core_environment
from benchmarks.handover.engine import AGGREGATED, Setup, Stamps
from benchmarks.handover.measure import Handover, Result
from benchmarks.handover.mix import MixRequest, MixTimes, TokenTimes
from benchmarks.handover.server import PATIENCE_SECONDS, Server, log_end, server_spec
from benchmarks.handover.server_plugins import (
    BOUND,
    NIXL_PLUS,
    RESTS,
    SECOND_RUNNER,
    WITHOUT_AMX,
    bound,
    nixl_plus,
    rests,
    second_runner,
    without_amx,
)
from benchmarks.handover.stream import post, post_stream, serve_all
from benchmarks.plugins import plugin_environment
from benchmarks.runners import has_second_runner
from kvferry.common.errors import ConfigError, KVFerryError, TransferError
from kvferry.tools.serving.devices import free_ports
from kvferry.tools.serving.engine import EngineSpec, EngineState
from kvferry.tools.serving.launch import Fleet, LaunchError
from kvferry.tools.serving.processes import temporary_folder
from kvferry.tools.serving.role import Role
from kvferry.tools.serving.router.bodies import COMPLETIONS, decode_body, kv_params_of, prefill_body

_FAVOURS: Mapping[str, Mapping[Callable[[], None], str]] = {
    "kvferry": {bound: BOUND},
    "nixl+": {nixl_plus: NIXL_PLUS, bound: BOUND},
    AGGREGATED: {rests: RESTS},
}
"""Plugins that give connectors each other's advantages, with what they print, by the connector's name."""


@dataclass(slots=True)
class ServerPair:
    """A prefill and a decode server, or one server that does both.

    Attributes:
        model: name of the model in requests.
        prefill: prefill server; None if the decode server does both.
        decode: decode server.
        loaded_tokens: number of prompt tokens whose KV the decode server had loaded at the last count.
    """

    model: str
    prefill: Server | None
    decode: Server
    loaded_tokens: int = field(default=0, init=False)

    def running(self) -> AbstractContextManager[None]:
        """Do nothing: servers always run."""
        return nullcontext()

    def hand_over(self, prompts: Sequence[Sequence[int]]) -> Result:
        """Compute prompts in one server and continue them in the other. See `Pair`."""
        bodies = [_request(self.model, prompt, 1) for prompt in prompts]
        params: list[dict[str, Any] | None] = [None] * len(bodies)
        if self.prefill is not None:
            prefilled = self.prefill.complete([prefill_body(body) for body in bodies])
            params = [_params(answer.body) for answer in prefilled]
        answers = self.decode.complete([decode_body(*each) for each in zip(bodies, params, strict=True)])
        return Result(
            Handover(tuple(Stamps(added=one.sent, answered=one.answered) for one in answers)),
            [one.parsed()["choices"][0]["token_ids"][0] for one in answers],
            self._settled_recomputed(sum(len(prompt) - 1 for prompt in prompts)) == 0,
        )

    def serve(self, requests: Sequence[MixRequest], clients: int) -> tuple[MixTimes, list[int]]:
        """Serve requests from several clients, and wait until the servers are idle.

        Args:
            requests: requests to serve.
            clients: number of clients. Each sends its next request when its last one is answered.

        Returns:
            The times of the requests, and the first token of each.

        Raises:
            TransferError: a server does not answer, or generates another number of tokens.
        """
        found = serve_all(requests, clients, self._stream, PATIENCE_SECONDS)
        prompts = sum(len(one.prompt) - 1 for one in requests)
        times = MixTimes(tuple(one for one, _ in found), self._settled_recomputed(prompts) / prompts)
        return times, [token for _, token in found]

    async def _stream(self, request: MixRequest) -> tuple[TokenTimes, int]:
        """Serve one request; return its times and its first token."""
        body = {**_request(self.model, request.prompt, request.answer), "stream": True}
        sent, params = time.perf_counter(), None
        if self.prefill is not None:
            params = _params(await post(self.prefill.port, COMPLETIONS, prefill_body(body)))
        events = await post_stream(self.decode.port, COMPLETIONS, decode_body(body, params))
        arrived = tuple(when for when, tokens in events for _ in tokens)
        if len(arrived) != request.answer:
            raise TransferError(f"a server gave {len(arrived)} tokens in place of {request.answer}")
        return TokenTimes(sent, arrived), events[0][1][0]

    def _settled_recomputed(self, wanted: int) -> int:
        """Wait until the servers are idle, and return the number of `wanted` tokens that were not loaded."""
        self.decode.settle()
        if self.prefill is None:
            return 0
        self.prefill.settle()
        before, self.loaded_tokens = self.loaded_tokens, self.decode.loaded_tokens()
        # A connector may leave the last token of each prompt to the decode engine.
        return max(wanted - (self.loaded_tokens - before), 0)


def _request(model: str, prompt: Sequence[int], tokens: int) -> dict[str, Any]:
    return {
        "model": model,
        "prompt": list(prompt),
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }


def _params(answer: bytes) -> dict[str, Any]:
    params = kv_params_of(answer)
    if params is None:
        raise TransferError("the prefill server has offered no KV (kv_transfer_params) in its answer")
    return params


@contextmanager
def server_pair(
    setup: Setup,
    *,
    ranks: tuple[int, int] = (1, 1),
    spec_of: Callable[[Setup, Role, int, dict[str, str]], EngineSpec] = server_spec,
    ports_of: Callable[[int], Sequence[int]] = free_ports,
    folder_of: Callable[[str], Path] = temporary_folder,
) -> Iterator[ServerPair]:
    """Start a prefill and a decode server, or one that does both, and end them with the ``with`` block.

    Args:
        setup: configuration of the engines. Each gets ports of its own.
        ranks: numbers of tensor-parallel ranks of the prefill and of the decode server.
        spec_of: function that returns the specification of a server, given `setup`, its role, its port and
            its environment.
        ports_of: function that returns this number of free ports.
        folder_of: function that creates the folder of the logs, given the start of its name.

    Raises:
        ConfigError: vLLM refuses an argument.
        LaunchError: a server does not start. The message has the last lines of its log.
        TransferError: a server runs without the settings of the benchmark.
    """
    plugins = {without_amx: WITHOUT_AMX, **_FAVOURS.get(setup.connector, {})}
    if has_second_runner():
        plugins[second_runner] = SECOND_RUNNER
    with _log_folder(folder_of) as folder:
        environment = plugin_environment(folder / "plugins", *plugins)
        setups = {
            Role.PREFILL: replace(setup, ranks=ranks[0]),
            Role.DECODE: replace(setup, ranks=ranks[1]),
        }
        if setup.connector == AGGREGATED:
            # It has the threads of both.
            setups = {Role.BOTH: replace(setup, threads=2 * setup.threads)}
        ports = zip(setups.items(), ports_of(len(setups)), ports_of(len(setups)), strict=True)
        specs = [
            spec_of(
                replace(one, port=own),
                role,
                port,
                environment | core_environment(first=role is Role.PREFILL, threads=one.threads * one.ranks),
            )
            for (role, one), port, own in ports
        ]
        with Fleet(specs, folder) as fleet:
            try:
                _wait_ready(fleet)
                _check_plugins(fleet, plugins.values())
                *prefill, decode = [Server(one) for one in fleet.engines]
                yield ServerPair(str(setup.model), prefill[0] if prefill else None, decode)
            except BaseException:
                fleet.kill()
                raise


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


def _check_plugins(fleet: Fleet, wanted: Iterable[str]) -> None:
    for one in fleet.engines:
        log = one.log_path.read_text(errors="replace")
        if missing := [sign for sign in wanted if sign not in log]:
            raise TransferError(f"{one.spec.name} does not say {missing[0]!r} (log: {one.log_path})")
