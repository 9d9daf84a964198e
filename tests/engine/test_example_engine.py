"""The example engine over transformers and a vLLM engine hand requests to each other."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from examples.transformers_engine import engine as example
from examples.transformers_engine.engine import Engine as ExampleEngine, Request
from examples.transformers_engine.handover import compare, give, take
from examples.transformers_engine.tiers import prompt
from kvferry.tools.serving.tiny import FAMILIES, tiny_checkpoint
from support.vllm_engine.pair import SOON, connector
from support.vllm_engine.process import Engine

pytestmark = [pytest.mark.engine, pytest.mark.long]

TOKENS, BLOCKS = 12, 128


@pytest.fixture(scope="module")
def checkpoint(checkpoints: Path) -> Path:
    return tiny_checkpoint("gemma3", checkpoints)


@pytest.fixture(scope="module")
def text(checkpoint: Path) -> list[int]:
    return prompt(checkpoint)


@pytest.fixture(scope="module")
def vllm(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    options = {**FAMILIES["gemma3"].engine_options(), "kv_transfer_config": connector()}
    engine = Engine(tmp_path_factory.mktemp("vllm") / "engine.log", model=str(checkpoint), **options)
    try:
        engine.ready()
        yield engine
    finally:
        engine.close()


@pytest.fixture(scope="module")
def reference(vllm: Engine, text: list[int]) -> list[int]:
    """The answer of vLLM alone."""
    (answer,) = vllm.call("generate", [text], tokens=TOKENS)
    assert len(set(answer["tokens"])) > TOKENS // 2, "a model that repeats itself shows little"
    found: list[int] = answer["tokens"]
    return found


@pytest.fixture(autouse=True)
def nothing_cached(vllm: Engine, reference: list[int]) -> None:
    vllm.call("step", SOON)
    assert vllm.call("reset_prefix_cache")


@pytest.fixture
def start(checkpoint: Path) -> Callable[..., Any]:
    """Start an example engine; all its blocks must be free when it has ended."""

    @contextmanager
    def started(kind: type[ExampleEngine] = ExampleEngine) -> Iterator[ExampleEngine]:
        before = torch.get_num_threads()
        torch.set_num_threads(1)
        engine = kind(checkpoint, {}, num_blocks=BLOCKS)
        try:
            yield engine
        finally:
            engine.close()
            torch.set_num_threads(before)
        assert engine.pool.get_num_free_blocks() == BLOCKS - 1

    return started


class Spoiled(ExampleEngine):
    """Zeroes what it has loaded."""

    def load(self, request: Request) -> Any:
        places = super().load(request)
        zero(self, request.tables.get_block_ids())
        return places


def zero(engine: ExampleEngine, tables: tuple[list[int], ...]) -> None:
    for numbers, ids in zip(engine.pages.groups, tables, strict=True):
        for number in numbers:
            engine.pages.layers[number][ids] = 0


class Served(httpx.BaseTransport):
    """vLLM's completions without a server in between: answers requests with the engine of the test.

    Attributes:
        before: called before each completion.
    """

    def __init__(self, vllm: Engine) -> None:
        self._vllm, self.before = vllm, lambda: None

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        if request.url.path == "/v1/models":
            return httpx.Response(200, json={"data": [{"id": "tiny"}]}, request=request)
        body = json.loads(request.read())
        assert (body["model"], body["temperature"], body["ignore_eos"]) == ("tiny", 0, True)
        self.before()
        params, tokens = body["kv_transfer_params"], body["max_tokens"]
        (answer,) = self._vllm.call("generate", [body["prompt"]], [params], tokens)
        choice = {"token_ids": answer["tokens"]}
        found = {"choices": [choice], "kv_transfer_params": answer["params"]}
        return httpx.Response(200, json=found, request=request)


@pytest.fixture
def server(vllm: Engine) -> Served:
    return Served(vllm)


@pytest.fixture
def client(server: Served) -> Iterator[httpx.Client]:
    with httpx.Client(base_url="http://vllm", transport=server) as client:
        yield client


@pytest.mark.parametrize("same", [True, False], ids=["as it is", "spoiled"])
def test_example_engine_continues_a_prompt_computed_by_vllm(client, start, text, reference, same):
    with start(ExampleEngine if same else Spoiled) as engine:
        answer = take(client, engine, text, TOKENS)
    assert (dict(answer.loaded), answer.computed) == ({"peer": len(text) - 1}, 1)
    assert (answer.token_ids == reference) is same


@pytest.mark.parametrize("same", [True, False], ids=["as it is", "spoiled"])
def test_vllm_continues_a_prompt_computed_by_the_example_engine(
    vllm, server, client, start, text, reference, same
):
    with start() as engine:
        if not same:
            server.before = lambda: [zero(engine, lent.get_block_ids()) for lent in engine.lent.values()]
        answer = give(client, engine, text, TOKENS)
        assert len(vllm.call("loaded")) == 1
    assert (answer == reference) is same


def test_command_prints_the_sources_of_tokens_and_compares(client, start, text, reference):
    said: list[str] = []
    with start() as engine:
        assert compare(client, engine, text, TOKENS, said.append)
    tokens = " ".join(map(str, reference))
    assert said == [
        f"computed here: {tokens}",
        f"continued here, {len(text) - 1} tokens from vLLM: {tokens}",
        f"computed here, continued by vLLM: {tokens}",
    ]
    with start(Spoiled) as engine:
        assert not compare(client, engine, text, TOKENS, said.append)


def test_other_weights_are_refused_and_the_prompt_is_computed(client, start, text, reference, monkeypatch):
    facts_of = example.facts_of
    monkeypatch.setattr(example, "facts_of", lambda *of: {**facts_of(*of), "weights": "others"})
    with start() as engine:
        answer = take(client, engine, text, TOKENS)
    assert (dict(answer.loaded), answer.computed) == ({}, len(text))
    assert answer.token_ids == reference
