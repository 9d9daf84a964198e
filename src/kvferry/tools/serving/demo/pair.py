"""Serve a model with a prefill and a decode engine, and compare their answers with a single engine's."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

import httpx

from kvferry.tools.serving.demo.client import StreamedAnswer, ask, routed
from kvferry.tools.serving.demo.report import AnswerVerdict, RequestRow, Screen, compare, read_transfer
from kvferry.tools.serving.devices import visible_devices
from kvferry.tools.serving.launch import Fleet, fleet_specs, make_log_dir, wait_ready
from kvferry.tools.serving.processes import StopSignals
from kvferry.tools.serving.smollm2 import TITLE, smollm2_checkpoint
from kvferry.tools.serving.specs import flag
from kvferry.tools.serving.tiny import cache_directory, family, tiny_checkpoint
from kvferry.tools.serving.tiny.tokenizer import passages

_LIKELIEST = 5
_REQUEST_SECONDS = 300.0
_TINY_ARGUMENTS = (
    # Compiling takes minutes, and the demo a few seconds.
    "--enforce-eager",
    "--max-model-len=2048",
    "--max-num-seqs=4",
    f"--kv-cache-memory-bytes={64 << 20}",
)
# Lengths of prompts in characters. The shortest has about 70 tokens, and the longest takes a small engine
# several steps.
_LENGTHS = (240, 1100, 2600, 6400)
_CHARACTERS_PER_TOKEN_AT_LEAST = 2
_OFFLINE = {"HF_HUB_OFFLINE": "1"}
_QUESTIONS = ("What is the capital of France?", "How many days are there in a week?", "What is 2 + 3?")


@dataclass(frozen=True, slots=True)
class DemoModel:
    """A model that the demo serves."""

    title: str
    path: str  # path or id that vLLM can load
    arguments: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    # Questions to ask in a chat; if there are none, the model continues passages of a text.
    questions: tuple[str, ...] = ()


def chat_model(arguments: Sequence[str] = ()) -> DemoModel:
    """Return SmolLM2, which has real weights and answers questions. Its checkpoint must exist."""
    # Its KV takes 46 KiB per token in float32.
    own = (f"--kv-cache-memory-bytes={256 << 20}", f"--dtype={_dtype('float32')}")
    return DemoModel(
        title=f"{TITLE}: full attention, real weights",
        path=str(smollm2_checkpoint()),
        arguments=(*_TINY_ARGUMENTS, *own, *arguments),
        environment=_OFFLINE,
        questions=_QUESTIONS,
    )


def _dtype(on_a_cpu: str) -> str:
    # float32 makes answers comparable on a CPU, but most GPU kernels do not support it.
    return "bfloat16" if visible_devices().gpus else on_a_cpu


def family_model(name: str, arguments: Sequence[str] = ()) -> DemoModel:
    """Return a family's tiny model; its checkpoint is written if missing. Raise ConfigError if unknown."""
    chosen = family(name)
    options = chosen.engine_options()
    options["dtype"] = _dtype(options["dtype"])
    flags = [flag(option, value) for option, value in options.items()]
    return DemoModel(
        title=f"{name}: {chosen.groups}",
        path=str(tiny_checkpoint(name, cache_directory())),
        arguments=(*_TINY_ARGUMENTS, *flags, *arguments),
        environment=_OFFLINE,
    )


def measure(
    model: DemoModel, folder: Path, screen: Screen, signals: StopSignals, *, count: int, answer_tokens: int
) -> Sequence[AnswerVerdict]:
    """Serve `model` with a prefill and a decode engine, show the answers, and return a verdict per answer.

    To reach the verdicts, the prefill engine also answers each prompt alone. All processes of the engines
    have ended when this function returns or raises an exception.

    Args:
        folder: folder for the engines' logs and for the transfer log.
        signals: a signal ends the run even while a request is being served.

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
    with Fleet(specs, folder) as fleet:
        with screen.starting() as show:
            wait_ready(fleet, show, signals)
        # Create the client first. It imports the modules that the router's thread also imports, and here
        # a signal can interrupt the import.
        with _client() as client, routed(fleet.prefill_urls, fleet.decode_urls) as url:
            run = _Run(
                client, url, fleet.prefill_urls[0], model.questions, answer_tokens, log, screen, signals
            )
            rows = run.rows(count)
    screen.results(rows)
    return [row.verdict for row in rows]


@dataclass(frozen=True, slots=True)
class _Run:
    """The part of the demo that sends the requests, after the engines and the router were started."""

    client: httpx.Client
    url: str
    single_url: str  # base URL of the prefill engine, which also answers each prompt alone
    questions: Sequence[str]
    answer_tokens: int
    log: Path
    screen: Screen
    signals: StopSignals

    def rows(self, count: int) -> Sequence[RequestRow]:
        served = self.client.get(f"{self.url}/v1/models").raise_for_status().json()["data"][0]
        *passages, first = _prompts(count + 1, served["max_model_len"] - self.answer_tokens)
        body = {"model": served["id"], "max_tokens": self.answer_tokens}
        # The first request includes the engines' handshake, so its time is shown but is not a result.
        handshake = self._ask(self.url, {**body, "prompt": first})
        self.screen.handshake(handshake.first_token_seconds)
        answers = []
        for number, text in enumerate(self.questions[:count] or passages, 1):
            asked = {**body, **self._chat(text)} if self.questions else {**body, "prompt": text}
            self.screen.asked(number, text)
            with self.screen.answering("pair") as on_text:
                answer = self._ask(self.url, asked, on_text)
            with self.screen.answering("alone") as on_text:
                verdict = self._judge(asked, answer, on_text)
            answers.append((answer, verdict))
        # The engine writes its log in a thread, which may end a line after the answer has come.
        return [
            RequestRow(
                len(answer.prompt),
                read_transfer(self.log, answer.request_id),
                answer.first_token_seconds,
                verdict,
            )
            for answer, verdict in answers
        ]

    def _chat(self, question: str) -> Mapping[str, Any]:
        """Return the fields of a request that asks a question by the model's chat template."""
        body = {"messages": [{"role": "user", "content": question}]}
        answer = self.client.post(f"{self.single_url}/tokenize", json=body).raise_for_status()
        return {"prompt": answer.json()["tokens"], "ignore_eos": False}

    def _judge(
        self, body: Mapping[str, Any], answer: StreamedAnswer, on_text: Callable[[str], None]
    ) -> AnswerVerdict:
        # A separate cache salt keeps the single engine from reusing the KV that it computed for the pair.
        alone = {**body, "logprobs": _LIKELIEST, "cache_salt": uuid.uuid4().hex}
        single = self._ask(self.single_url, alone, on_text)

        def prefill(tokens: Sequence[int]) -> Mapping[int, float]:
            again = {**alone, "prompt": tokens, "max_tokens": 1}
            return self._ask(self.single_url, again).logprobs[0]

        return compare(answer, single, prefill)

    def _ask(
        self, url: str, body: Mapping[str, Any], on_text: Callable[[str], None] = lambda _: None
    ) -> StreamedAnswer:
        request_id = f"demo-{uuid.uuid4().hex}"
        with self.signals.interruptible():
            return ask(self.client, url, body, request_id=request_id, on_text=on_text)


def _prompts(count: int, max_prompt_tokens: int) -> Sequence[str]:
    """Return up to `count` passages of a text, which has about 70, cut to `_LENGTHS` in turn."""
    longest = max_prompt_tokens * _CHARACTERS_PER_TOKEN_AT_LEAST
    whole = islice(passages(max(_LENGTHS)), count)
    return [text[: min(_LENGTHS[i % len(_LENGTHS)], longest)] for i, text in enumerate(whole)]


def _client() -> httpx.Client:
    # trust_env: ignore a proxy set in the environment, because the engines are on this machine.
    # keepalive_expiry: vLLM's server closes an idle connection after 5 seconds, and a request sent just
    # then fails.
    limits = httpx.Limits(keepalive_expiry=2)
    return httpx.Client(timeout=_REQUEST_SECONDS, trust_env=False, limits=limits)
