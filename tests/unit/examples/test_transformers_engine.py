"""The example engine: its answers are those of transformers, wherever the KV comes from."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from examples.transformers_engine.engine import Answer, Engine, Request
from examples.transformers_engine.tiers import (
    ANSWER_TOKENS,
    CHUNK_TOKENS,
    PROMPT_TOKENS,
    damage,
    demonstrate,
    in_new_process,
    prompt,
)
from kvferry.tools.serving.tiny import tiny_checkpoint

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]
BLOCKS = 200


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    return tiny_checkpoint("gemma3", tmp_path_factory.getbasetemp() / "tiny")


@pytest.fixture(scope="module")
def tokens(checkpoint) -> list[int]:
    return prompt(checkpoint)


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def reference(checkpoint) -> Callable[[list[int]], list[int]]:
    """Answers of transformers with a cache of its own."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    model.generation_config.eos_token_id = None

    def answer(tokens: list[int]) -> list[int]:
        ids = torch.tensor([tokens])
        new = model.generate(ids, do_sample=False, max_new_tokens=ANSWER_TOKENS, min_new_tokens=ANSWER_TOKENS)
        return new[0, len(tokens) :].tolist()

    return answer


@pytest.fixture
def start(checkpoint, tmp_path):
    """Start an engine over `tmp_path`; all its blocks must be free when it has ended."""

    @contextmanager
    def started(kind: type[Engine] = Engine) -> Iterator[Engine]:
        file = {"type": "file", "path": str(tmp_path), "capacity": "16MiB"}
        kept = [{"type": "host", "capacity": "16MiB"}, file]
        engine = kind(checkpoint, {"tiers": kept, "chunk_tokens": CHUNK_TOKENS}, num_blocks=BLOCKS)
        try:
            yield engine
        finally:
            engine.close()
        assert engine.pool.get_num_free_blocks() == BLOCKS - 1

    return started


def test_answers_of_the_example_engine_are_those_of_transformers(start, tokens, reference):
    with start() as engine:
        answer = engine.generate(tokens, ANSWER_TOKENS)
    assert (dict(answer.loaded), answer.computed) == ({}, len(tokens))
    assert answer.token_ids == reference(tokens)
    assert len(set(answer.token_ids)) > ANSWER_TOKENS // 2, "a model that repeats itself shows little"


def test_answers_are_the_same_from_host_memory_and_from_files(start, tokens, reference):
    with start() as engine:
        engine.generate(tokens, ANSWER_TOKENS)
        engine.finish_stores()
        again = engine.generate(tokens, ANSWER_TOKENS)
    with start() as new:
        from_file = new.generate(tokens, ANSWER_TOKENS)
    assert (dict(again.loaded), again.computed) == ({"host": len(tokens)}, 1)
    assert (dict(from_file.loaded), from_file.computed) == ({"file": len(tokens)}, 1)
    assert again.token_ids == from_file.token_ids == reference(tokens)


def test_engine_computes_only_tokens_after_a_stored_prefix(start, tokens, reference):
    longer = [*tokens, *reversed(tokens[:50])]
    with start() as engine:
        engine.generate(tokens, ANSWER_TOKENS)
        engine.finish_stores()
        answer = engine.generate(longer, ANSWER_TOKENS)
    whole = len(tokens) // CHUNK_TOKENS * CHUNK_TOKENS
    assert (dict(answer.loaded), answer.computed) == ({"host": whole}, len(longer) - whole)
    assert answer.token_ids == reference(longer)


class Spoiled(Engine):
    """Zeroes the loaded blocks of one group, after the checksums have been compared."""

    group = 0

    def load(self, request: Request):
        places = super().load(request)
        for number in self.pages.groups[self.group]:
            self.pages.layers[number][list(request.tables.get_block_ids()[self.group])] = 0
        return places


@pytest.mark.parametrize("number", [0, 1], ids=["windows", "full attention"])
def test_kv_spoiled_after_the_checksum_changes_the_answer(start, tokens, reference, number):
    class SpoiledGroup(Spoiled):
        group = number

    with start() as engine:
        engine.generate(tokens, ANSWER_TOKENS)
    with start(SpoiledGroup) as spoiled:
        answer = spoiled.generate(tokens, ANSWER_TOKENS)
    assert dict(answer.loaded) == {"file": len(tokens)}
    assert answer.token_ids != reference(tokens)


def test_damaged_chunks_are_refused_and_the_prompt_is_computed(start, tokens, reference, tmp_path):
    with start() as engine:
        engine.generate(tokens, ANSWER_TOKENS)
    assert damage(tmp_path) > 0
    with start() as new:
        answers = [new.generate(tokens, ANSWER_TOKENS)]
        # The first damaged chunk ends the load. A chunk whose read is still under way then is not stored; a
        # later answer computes and stores it.
        while dict(answers[-1].loaded) != {"host": len(tokens)} and len(answers) < 10:
            new.finish_stores()
            answers.append(new.generate(tokens, ANSWER_TOKENS))
    assert (dict(answers[0].loaded), answers[0].computed) == ({}, len(tokens))
    assert dict(answers[-1].loaded) == {"host": len(tokens)}
    expected = reference(tokens)
    assert [answer.token_ids for answer in answers] == [expected] * len(answers)


def test_a_load_holds_only_the_window_of_layers_that_have_one(start, tokens):
    held = []

    class Watched(Engine):
        def load(self, request: Request):
            places = super().load(request)
            held.append([sum(id_ > 0 for id_ in ids) for ids in request.tables.get_block_ids()])
            return places

    with start(Watched) as engine:
        engine.generate(tokens, ANSWER_TOKENS)
        engine.finish_stores()
        engine.generate(tokens, ANSWER_TOKENS)
    windows, full = held[1]
    assert full == -(-len(tokens) // 16)
    assert windows <= 64 // 16 + 1


@pytest.mark.long  # import-linter forbids the example to import vLLM
@pytest.mark.timeout(1200)
def test_example_engine_runs_without_vllm(checkpoint, tmp_path):
    code = (
        "import sys; sys.modules['vllm'] = sys.modules['kvferry.engines'] = None\n"  # imports of these raise
        "from pathlib import Path\n"
        "from examples.transformers_engine.tiers import answer\n"
        "found = answer(*map(Path, sys.argv[1:]), times=2)\n"
        "assert dict(found[1].loaded), found\n"
    )
    command = [sys.executable, "-c", code, str(checkpoint), str(tmp_path)]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr


def here(call):
    return call()


# Four processes, each of which imports torch and transformers.
IN_NEW_PROCESSES = pytest.param(in_new_process, marks=[pytest.mark.long, pytest.mark.timeout(1200)])


@pytest.mark.parametrize("elsewhere", [here, IN_NEW_PROCESSES])
def test_demonstration_passes(checkpoint, tmp_path, elsewhere):
    said: list[str] = []
    assert demonstrate(checkpoint, tmp_path, said.append, elsewhere=elsewhere), "\n".join(said)
    assert len(said) == 5
    assert "300 from file, 1 computed" in said[2]


def test_demonstration_fails_if_its_control_gives_the_same_answer(checkpoint, tmp_path):
    sources = [{}, {"host": PROMPT_TOKENS}, {"file": PROMPT_TOKENS}, {"file": PROMPT_TOKENS}, {}]
    first, second, *later = (Answer(token_ids=[1, 2], loaded=source, computed=1) for source in sources)
    answers = iter([[first, second], *([one] for one in later)])
    said: list[str] = []
    assert not demonstrate(checkpoint, tmp_path, said.append, elsewhere=lambda _: next(answers))
    assert "NOT as expected" in said[3]
    assert all("NOT" not in text for text in (*said[:3], said[4]))
