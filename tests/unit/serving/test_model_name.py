"""A wrong model is refused before an engine starts."""

from __future__ import annotations

import httpx
import huggingface_hub as hub
import pytest
from huggingface_hub.errors import RemoteEntryNotFoundError, RepositoryNotFoundError

from kvferry.common.errors import ConfigError
from kvferry.tools.serving.machine_checks import check_model
from support.command_line import run_kvferry


def answering(monkeypatch, error: Exception) -> None:
    """Let the hub answer with an error, and have an empty cache."""

    def fail(*_, **__):
        raise error

    monkeypatch.setattr(hub, "get_hf_file_metadata", fail)
    monkeypatch.setattr(hub, "try_to_load_from_cache", lambda *_: None)


def response(code: int) -> httpx.Response:
    return httpx.Response(code, request=httpx.Request("HEAD", "http://hub"))


UNKNOWN = RepositoryNotFoundError("no such repository", response=response(404))
OTHER_FORMAT = RemoteEntryNotFoundError("no such file", response=response(404))


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (UNKNOWN, "the Hugging Face hub does not give it (is the name right, does it need HF_TOKEN?)"),
        (ConnectionError("no route"), "the Hugging Face hub cannot be reached (ConnectionError); give a"),
        (ValueError("bad name"), "the Hugging Face hub has no such names"),
    ],
)
def test_a_name_that_is_neither_a_folder_nor_on_the_hub_is_refused(monkeypatch, error, said):
    answering(monkeypatch, error)
    with pytest.raises(ConfigError) as caught:
        check_model("Qwen/Qwen3-0.66B")
    assert str(caught.value).startswith(f"there is no folder 'Qwen/Qwen3-0.66B' here, and {said}")


@pytest.mark.parametrize("model", ["mistralai/Mistral-7B", "org/model-GGUF:Q4_K_M", "s3://bucket/model"])
def test_a_model_in_another_form_or_place_is_left_to_vllm(monkeypatch, model):
    answering(monkeypatch, OTHER_FORMAT)
    check_model(model)


def test_a_model_in_the_cache_needs_no_hub(monkeypatch, tmp_path):
    answering(monkeypatch, ConnectionError())
    monkeypatch.setattr(hub, "try_to_load_from_cache", lambda *_: str(tmp_path))
    check_model("Qwen/Qwen3-0.6B")


@pytest.mark.parametrize("name", ["config.json", "params.json"])
def test_a_folder_with_a_checkpoint_is_a_model(tmp_path, name):
    with pytest.raises(ConfigError, match=f"the folder {tmp_path} holds no config.json or params.json; give"):
        check_model(str(tmp_path))
    (tmp_path / name).write_text("{}")
    check_model(str(tmp_path))


@pytest.mark.parametrize("command", ["serve", "demo"])
def test_serve_and_demo_refuse_a_wrong_name_in_one_sentence(monkeypatch, command):
    answering(monkeypatch, UNKNOWN)
    done = run_kvferry(command, "Qwen/Qwen3-0.66B")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert done.stderr.startswith("kvferry: there is no folder 'Qwen/Qwen3-0.66B' here, and the Hugging Face")
