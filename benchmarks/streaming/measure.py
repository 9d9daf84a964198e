"""Measure the time to first token between two engines on two hosts, with both ways to hand over KV."""

from __future__ import annotations

import json
import random
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import httpx

from benchmarks.checkpoint import VOCABULARY, token_bytes, write_checkpoint
from benchmarks.hosts import LinkedHost, on_linked_hosts
from kvferry.common.errors import TransferError
from kvferry.tools.serving.launch import EngineSpec, Fleet, Role, fleet_specs
from kvferry.tools.serving.router.backends import StreamSource, new_ticket
from kvferry.tools.serving.router.bodies import COMPLETIONS, decode_body, kv_params_of, prefill_body

CHUNK_TOKENS = 2048
"""Tokens that a step of the engines computes."""

MODEL = {"num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 8}
"""Two layers with 4 KiB of KV per token: on a CPU, attention over a long prompt takes long."""

KV_BYTES = token_bytes(MODEL)
_PATIENCE_SECONDS = 300.0


@dataclass(frozen=True, slots=True)
class FirstToken:
    """The times of one request.

    Attributes:
        streamed: True if KV was read while the prompt was computed.
        gigabits: rate of the link in Gbit/s; 0 for no limit.
        tokens: number of tokens of the prompt.
        seconds: time until the decode engine's first token.
        prefill_seconds: time until the prefill engine's answer.
    """

    streamed: bool
    gigabits: float
    tokens: int
    seconds: float
    prefill_seconds: float

    @property
    def left_seconds(self) -> float:
        """Time between the prefill engine's answer and the first token."""
        return self.seconds - self.prefill_seconds


@dataclass(frozen=True)
class _PlacedSpec(EngineSpec):
    """An engine that runs on a host."""

    on: LinkedHost | None = None

    def command(self) -> list[str]:
        command = super().command()
        return command if self.on is None else self.on.command(command)


class _Pair:
    """A prefill and a decode engine on two hosts, asked from the decode engine's host."""

    def __init__(self, model: Path, prefill: str, decode: str) -> None:
        self._model, self._prefill, self._decode = str(model), prefill, decode
        self._source: StreamSource | None = None

    def ask(self, prompt: Sequence[int], *, streamed: bool) -> tuple[float, float]:
        """Return the times to the first token and to the prefill engine's answer, in seconds."""
        body = {"model": self._model, "prompt": list(prompt), "max_tokens": 2, "stream": True}
        body |= {"temperature": 0, "ignore_eos": True}
        answered: list[float] = []
        started = time.perf_counter()

        def prefill(ticket: str | None) -> dict[str, Any]:
            reply = _post(self._prefill, prefill_body(body, ticket))
            answered.append(time.perf_counter() - started)
            return kv_params_of(reply.content) or {}

        if not streamed:
            params = prefill(None)
            self._source = StreamSource.of(params)
            seconds = _first_event(self._decode, decode_body(body, params), started)
            return seconds, answered[0]
        if self._source is None:
            raise TransferError("the prefill engine's KV cannot be read while it computes a prompt")
        ticket = new_ticket()
        thread = threading.Thread(target=prefill, args=(ticket,))
        thread.start()
        seconds = _first_event(self._decode, decode_body(body, self._source.offer(ticket)), started)
        thread.join()
        return seconds, answered[0]


def _post(url: str, body: bytes) -> httpx.Response:
    with httpx.Client(timeout=_PATIENCE_SECONDS, trust_env=False) as client:
        return client.post(url + COMPLETIONS, content=body, headers=_JSON).raise_for_status()


_JSON = {"content-type": "application/json"}


def _first_event(url: str, body: bytes, started: float) -> float:
    with (
        httpx.Client(timeout=_PATIENCE_SECONDS, trust_env=False) as client,
        client.stream("POST", url + COMPLETIONS, content=body, headers=_JSON) as response,
    ):
        first = None
        for line in response.iter_lines():
            if first is None and line.startswith("data:"):
                first = time.perf_counter() - started
                json.loads(line[5:])
    if first is None:
        raise TransferError("the decode engine has answered without a token")
    return first


@contextmanager
def _running(folder: Path, hosts: Sequence[LinkedHost], longest: int) -> Iterator[_Pair]:
    model = write_checkpoint(folder / "model", longest, MODEL)
    secret = folder / "secret"
    secret.write_text(new_ticket())
    secret.chmod(0o600)
    log = str(folder / "transfers.jsonl")
    # In truth both hosts are one machine, and the engines could share memory.
    settings = {"host": "node", "secret_file": str(secret), "transfer_log": log, "strategy": "direct"}
    arguments = ["--enforce-eager", "--skip-tokenizer-init", f"--max-model-len={longest}", "--max-num-seqs=4"]
    arguments += [f"--max-num-batched-tokens={CHUNK_TOKENS}", "--no-enable-prefix-caching"]
    arguments += [f"--kv-cache-memory-bytes={4 * longest * KV_BYTES}"]
    specs = fleet_specs(
        str(model), prefill_settings=settings, decode_settings=settings, arguments=tuple(arguments)
    )
    placed = [_placed(spec, hosts[spec.role is Role.DECODE]) for spec in specs]
    with Fleet(placed, folder / "logs") as fleet:
        fleet.wait_ready()
        yield _Pair(model, fleet.prefill_urls[0], fleet.decode_urls[0])


def _placed(spec: EngineSpec, host: LinkedHost) -> _PlacedSpec:
    known = {each.name: getattr(spec, each.name) for each in fields(spec)}
    network = {"UCX_TLS": "tcp,self", "UCX_NET_DEVICES": host.device, "VLLM_HOST_IP": host.address}
    threads = {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    environment = {**spec.environment, **network, **threads}
    return _PlacedSpec(**{**known, "host": host.address, "environment": environment}, on=host)


def measure(
    lengths: Sequence[int],
    links: Sequence[float],
    rounds: int,
    progress: Callable[[str], None],
) -> list[FirstToken]:
    """Start two engines on two hosts, and measure both ways for every length and link, in turns.

    Args:
        lengths: numbers of tokens of the prompts.
        links: rates of the link in Gbit/s; 0 for no limit.
        rounds: measurements of each.
        progress: function that is called with a text for the user.

    Raises:
        ConfigError: network namespaces cannot be created.
    """

    def run(*hosts: LinkedHost) -> list[FirstToken]:
        progress("starting two engines")
        with (
            tempfile.TemporaryDirectory(prefix="kvferry-streaming-") as folder,
            _running(Path(folder), hosts, max(lengths) + 64) as pair,
        ):
            return list(_measure(pair, hosts, lengths, links, rounds, progress))

    found: list[FirstToken] = on_linked_hosts(run)
    return found


def _measure(
    pair: _Pair,
    hosts: Sequence[LinkedHost],
    lengths: Sequence[int],
    links: Sequence[float],
    rounds: int,
    progress: Callable[[str], None],
) -> Iterator[FirstToken]:
    draw = random.Random(1)  # noqa: S311 - prompts
    for streamed in (False, True):  # the handshake, and what the engines do for the first time
        pair.ask([draw.randrange(VOCABULARY) for _ in range(min(lengths))], streamed=streamed)
    for gigabits in links:
        for host in hosts:
            host.limit(gigabits)
        for tokens in lengths:
            for number in range(rounds):
                progress(f"{gigabits:g} Gbit/s, {tokens} tokens, round {number + 1} of {rounds}")
                for streamed in (False, True):
                    prompt = [draw.randrange(VOCABULARY) for _ in range(tokens)]
                    seconds, prefill = pair.ask(prompt, streamed=streamed)
                    yield FirstToken(streamed, gigabits, tokens, seconds, prefill)
