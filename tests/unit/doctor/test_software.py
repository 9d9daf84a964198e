import json

import pytest

from kvferry.engines.vllm.version import TESTED
from kvferry.tools.doctor import software
from kvferry.tools.doctor.finding import ProcessResult, State
from kvferry.tools.doctor.probes import parse_output
from kvferry.tools.extras import INSTALL_PAGE

MARK = "kvferry doctor: "


def told(*lines: dict, err: str = "", code: int | None = 0) -> ProcessResult:
    return ProcessResult(code, "\n".join(f"noise {MARK}{json.dumps(line)}" for line in lines), err)


def test_the_output_of_a_probe_is_found_among_that_of_libraries():
    out = f'chatter\n\x1b[0m{MARK}{{"a": 1}}\n{MARK}{{"b": [2]}}\n{MARK}{{"cut'
    assert parse_output(out) == [{"a": 1}, {"b": [2]}]


@pytest.mark.parametrize(
    ("version", "state"),
    [
        (None, State.NOTE),
        (f"{TESTED}.1", State.OK),
        ("0.33.0+cpu", State.OK),
        ("0.30.0", State.BAD),
        ("0.34.0", State.BAD),
        (f"{TESTED}0.0", State.BAD),
    ],
)
def test_vllm_must_be_a_supported_one(version, state):
    assert software.vllm(version).state is state


def test_advice_names_the_extra_and_the_page_about_installation():
    wanted = f"install kvferry's extra vllm, or vLLM's build for CPUs, as {INSTALL_PAGE} says"
    assert software.vllm(None).advice == wanted
    (broken,) = software.connector(lambda: told(err="RuntimeError: no torch", code=1))
    assert broken.advice == f"repair the installation: {wanted}"


def test_a_connector_that_loads():
    ended = told({"version": f"{TESTED}.0"}, {"connector": True, "platform": True, "device": "cuda"})
    loaded, hybrid = software.connector(lambda: ended)
    assert (loaded.state, loaded.found) == (State.OK, f"vLLM {TESTED}.0 loads it, for cuda")
    assert hybrid.state is State.OK


CPU = {"connector": True, "platform": True, "device": "cpu"}


@pytest.mark.parametrize(
    ("lines", "code", "state", "said"),
    [
        (({"trying": "attention"}, {"attention": "vec"}), 0, State.OK, "works on this CPU (vec)"),
        (({"trying": "attention"}, {"attention": "amx"}), 0, State.OK, "works on this CPU (amx)"),
        (({"trying": "attention"},), -4, State.BAD, "does not work here: signal 4 ended it"),
    ],
)
def test_the_engines_attention_is_tried_on_a_cpu(lines, code, state, said):
    ended = told({"version": f"{TESTED}.0"}, CPU, *lines, code=code)
    found = software.connector(lambda: ended)[-1]
    assert (found.state, said in found.found) == (state, True)
    assert "add --dtype float32" in found.advice or state is State.OK


def test_a_platform_without_the_hybrid_manager():
    ended = told({"version": f"{TESTED}.0"}, {"connector": True, "platform": False, "device": "tpu"})
    assert software.connector(lambda: ended)[1].state is State.BAD


@pytest.mark.parametrize(
    ("ended", "words"),
    [
        (
            told(err="Trace\nRuntimeError: operator torchvision::nms does not exist\n", code=1),
            "vLLM itself cannot be imported: RuntimeError: operator torchvision::nms",
        ),
        (
            told({"version": "0.40.0"}, err="ImportError: cannot import name 'x'", code=1),
            "vLLM cannot load it: ImportError",
        ),
        (told(code=None), "vLLM itself cannot be imported: it did not finish in time"),
    ],
)
def test_a_connector_that_does_not_load(ended, words):
    (found,) = software.connector(lambda: ended)
    assert found.state is State.BAD
    assert words in found.found


def test_the_finding_names_the_code_that_copies_cells():
    assert software.copies(kernel=True, why="").state is State.OK
    found = software.copies(kernel=False, why="it was not built")
    assert (found.state, found.found[-16:]) == (State.NOTE, "it was not built")
    assert "C compiler" in found.advice


def test_the_hash_seed_plays_no_part():
    assert "PYTHONHASHSEED (not set) does not matter" in software.hash_seed({}).found
    assert "(7)" in software.hash_seed({"PYTHONHASHSEED": "7"}).found


def test_the_finding_says_if_weights_are_read_at_every_start(tmp_path, monkeypatch):
    memory = tmp_path / "kvferry" / "weights.json"
    assert software.weights_cache(None, 0).state is State.NOTE
    assert "will be remembered" in software.weights_cache(memory, 0).found
    assert "digests of 3 files" in software.weights_cache(memory, 3).found
    monkeypatch.setattr(software.os, "access", lambda *_: False)
    found = software.weights_cache(memory, 3)
    assert (found.state, "every engine start reads all weights again" in found.found) == (State.NOTE, True)
