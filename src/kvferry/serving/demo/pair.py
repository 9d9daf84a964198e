"""Serve a model with a prefill and a decode engine, and compare their answers with a single engine's."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx

from kvferry.serving.demo.client import StreamedAnswer, ask
from kvferry.serving.demo.endpoint import routed
from kvferry.serving.demo.report import RequestRow
from kvferry.serving.demo.screen import Screen
from kvferry.serving.demo.text import prompts
from kvferry.serving.demo.transfers import read_transfer
from kvferry.serving.demo.verdict import AnswerVerdict, compare
from kvferry.serving.devices import visible_devices
from kvferry.serving.engine import EngineProcess, EngineSpec
from kvferry.serving.launch import Fleet, fleet_specs, make_log_dir
from kvferry.serving.signals import StopSignals
from kvferry.serving.specs import flag
from kvferry.serving.tiny import cache_directory, family, tiny_checkpoint

_LIKELIEST = 5
_REQUEST_SECONDS = 300.0
_TINY_ARGUMENTS = (
    "--enforce-eager",
    "--max-model-len=2048",
    "--max-num-seqs=4",
    f"--kv-cache-memory-bytes={64 << 20}",
)


@dataclass(frozen=True, slots=True)
class DemoModel:
    """A model that the demo serves.

    Attributes:
        title: name that the demo displays.
        path: path or id that vLLM can load.
        arguments: additional arguments of vLLM's API server.
        environment: environment variables of the engine processes.
    """

    title: str
    path: str
    arguments: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)


def family_model(name: str, arguments: Sequence[str] = ()) -> DemoModel:
    """Return the tiny model of a model family. Write its checkpoint to disk if it does not exist.

    The weights are random, and the model is small enough for a CPU.

    Args:
        name: name of the family, such as ``qwen3``.
        arguments: additional arguments of vLLM's API server.

    Raises:
        ConfigError: the family is unknown.
    """
    chosen = family(name)
    options = chosen.engine_options()
    if visible_devices().gpus:
        # float32 makes answers comparable on a CPU, but most GPU kernels do not support it.
        options["dtype"] = "bfloat16"
    flags = [flag(option, value) for option, value in options.items()]
    return DemoModel(
        title=f"{name}: {chosen.groups}",
        path=str(tiny_checkpoint(name, cache_directory())),
        arguments=(*_TINY_ARGUMENTS, *flags, *arguments),
        environment={"HF_HUB_OFFLINE": "1"},
    )


def measure(
    model: DemoModel, folder: Path, screen: Screen, signals: StopSignals, *, count: int, answer_tokens: int
) -> Sequence[AnswerVerdict]:
    """Serve `model` with a prefill and a decode engine, show the answers, and return a verdict per answer.

    A table shows the KV load of each request. To reach the verdicts, the prefill engine also answers each
    prompt alone, and its answers are compared with those of the two engines. All processes of the engines
    have ended when this function returns or raises an exception.

    Args:
        model: model to serve.
        folder: folder for the engines' logs and for the transfer log (file with a line per finished KV load).
        screen: output for the user.
        signals: handler of stop signals. A signal ends the run even while a request is being served.
        count: number of requests.
        answer_tokens: length of each answer, in tokens.

    Raises:
        LaunchError: an engine did not start.
        CompletionError: a request failed.
        StopRequested, KeyboardInterrupt: the process received a signal.
    """
    make_log_dir(folder)  # first, because the connector's settings are checked against the machine
    log = folder / "transfers.jsonl"
    specs = fleet_specs(model.path, decode_settings={"transfer_log": str(log)}, arguments=model.arguments)
    screen.model(model.title)
    specs = tuple(replace(spec, environment={**spec.environment, **model.environment}) for spec in specs)
    rows = _measured(specs, log, screen, signals, count=count, answer_tokens=answer_tokens)
    screen.results(rows)
    return [row.verdict for row in rows]


def _measured(
    specs: Sequence[EngineSpec],
    log: Path,
    screen: Screen,
    signals: StopSignals,
    *,
    count: int,
    answer_tokens: int,
) -> Sequence[RequestRow]:
    """Start two engines and a router, send the requests, stop everything, and return a row per request.

    Args:
        specs: specifications of the prefill engine and the decode engine.
        log: path of the decode engine's transfer log (file with a line per finished KV load). The logs of
            both engines are written into the same folder.
        screen: output for the user.
        signals: handler of stop signals. A signal ends the run even while a request is being served.
        count: number of requests.
        answer_tokens: length of each answer, in tokens.
    """
    with Fleet(specs, log.parent) as fleet:
        with screen.starting() as show:

            def on_progress(engines: Sequence[EngineProcess]) -> None:
                signals.check()
                show(engines)

            fleet.wait_ready(on_progress)
        single_url = fleet.prefill_urls[0]
        # Create the client first. It imports the modules that the router's thread also imports, and here
        # a signal can interrupt the import.
        with _client() as client, routed(fleet.prefill_urls, fleet.decode_urls) as url:
            run = _Run(
                client=client,
                url=url,
                single_url=single_url,
                answer_tokens=answer_tokens,
                log=log,
                screen=screen,
                signals=signals,
            )
            return run.rows(count)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Run:
    """The part of the demo that sends the requests, after the engines and the router were started.

    Attributes:
        client: HTTP client for the router and the engines.
        url: base URL of the router.
        single_url: base URL of the prefill engine. This engine also answers each prompt alone, for the
            comparison.
        answer_tokens: length of each answer, in tokens.
        log: path of the decode engine's transfer log (file with a line per finished KV load).
        screen: output for the user.
        signals: handler of stop signals. A signal interrupts the current request.
    """

    client: httpx.Client
    url: str
    single_url: str
    answer_tokens: int
    log: Path
    screen: Screen
    signals: StopSignals

    def rows(self, count: int) -> Sequence[RequestRow]:
        """Send `count` prompts through the router, then to one engine alone, and return a row per prompt.

        One more request is sent first. It makes the two engines connect, and has no row in the result.

        Args:
            count: number of prompts.
        """
        served = self.client.get(f"{self.url}/v1/models").raise_for_status().json()["data"][0]
        *texts, first = prompts(count + 1, served["max_model_len"] - self.answer_tokens)
        body = {"model": served["id"], "max_tokens": self.answer_tokens}
        # The first request includes the engines' handshake, so its time is shown but is not a result.
        self.screen.handshake(self._ask(self.url, {**body, "prompt": first}).first_token_seconds)
        measured = []
        for number, text in enumerate(texts, 1):
            request_id = f"demo-{uuid.uuid4().hex}"
            with self.screen.answering(number, text) as on_text, self.signals.interruptible():
                answer = ask(
                    self.client, self.url, {**body, "prompt": text}, request_id=request_id, on_text=on_text
                )
            measured.append((answer, request_id))
        self.screen.note("Asking one engine alone ...")
        verdicts = [
            self._judge(body, text, answer) for text, (answer, _) in zip(texts, measured, strict=True)
        ]
        # The engine writes its log in a thread, which may end a line after the answer has come.
        return [
            RequestRow(
                len(answer.prompt), read_transfer(self.log, request_id), answer.first_token_seconds, verdict
            )
            for (answer, request_id), verdict in zip(measured, verdicts, strict=True)
        ]

    def _judge(self, body: Mapping[str, Any], text: str, answer: StreamedAnswer) -> AnswerVerdict:
        """Let the prefill engine answer a prompt alone, and return the verdict on the two engines' `answer`.

        Args:
            body: JSON fields of the request, except for the prompt.
            text: text of the prompt.
            answer: answer of the prefill and decode engines together.
        """
        # A separate cache salt keeps the single engine from reusing the KV that it computed for the pair.
        alone = {**body, "logprobs": _LIKELIEST, "cache_salt": uuid.uuid4().hex}
        single = self._ask(self.single_url, {**alone, "prompt": text})

        def prefill(tokens: Sequence[int]) -> Mapping[int, float]:
            return self._ask(self.single_url, {**alone, "prompt": tokens, "max_tokens": 1}).logprobs[0]

        return compare(answer, single, prefill)

    def _ask(self, url: str, body: Mapping[str, Any]) -> StreamedAnswer:
        with self.signals.interruptible():
            return ask(self.client, url, body, request_id=f"demo-{uuid.uuid4().hex}")


def _client() -> httpx.Client:
    # trust_env: ignore a proxy set in the environment, because the engines are on this machine.
    return httpx.Client(timeout=_REQUEST_SECONDS, trust_env=False)
