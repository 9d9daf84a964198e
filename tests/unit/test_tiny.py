from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest

from kvferry.common.errors import ConfigError
from kvferry.tools.serving.tiny import FAMILIES, tiny_checkpoint, trained_tokenizer
from kvferry.tools.serving.tiny.tokenizer import SPECIAL_IDS, VOCABULARY, corpus, passages, publish

pytestmark = pytest.mark.slow


def test_passages_have_the_requested_length_and_do_not_overlap() -> None:
    text, after = corpus(), 0
    for passage in passages(5000):
        start = text.index(passage, after)
        assert len(passage) == 5000
        after = start + 5000
    assert after > 0.8 * len(text)


def test_a_passage_longer_than_the_text_is_refused() -> None:
    with pytest.raises(ConfigError, match="the text has"):
        next(passages(10**9))


def test_concurrent_publishers_all_see_one_complete_folder(tmp_path: Path) -> None:
    together = threading.Barrier(8)
    seen = []

    def fill(folder: Path) -> None:
        (folder / "first").write_text("1")
        together.wait()
        (folder / "last").write_text("2")

    def ask() -> None:
        seen.append(sorted(path.name for path in publish(tmp_path, "thing", fill).iterdir()))

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == [["first", "last"]] * 8
    assert [path.name for path in tmp_path.iterdir()] == ["thing"]


def test_a_failed_publication_leaves_no_files(tmp_path: Path) -> None:
    def fill(folder: Path) -> None:
        (folder / "half").touch()
        raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        publish(tmp_path, "thing", fill)
    assert not list(tmp_path.iterdir())


def test_a_directory_that_cannot_be_written_is_named_with_the_way_out() -> None:
    refused = "cannot keep thing in /proc/none: No such file or directory; set XDG_CACHE_HOME to a directory"
    with pytest.raises(ConfigError, match=refused):
        publish(Path("/proc/none"), "thing", Path.touch)


def test_an_unknown_name_lists_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="qwen3, llama, gemma3"):
        tiny_checkpoint("gpt9", tmp_path)


def test_the_tokenizer_gives_back_what_it_was_given(tmp_path: Path) -> None:
    tokenizer = pytest.importorskip("transformers").AutoTokenizer.from_pretrained(trained_tokenizer(tmp_path))
    for text in (corpus()[1000:3000], "naïve — Ünïcödé 你好 \x00\t\n"):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert len(tokenizer) == VOCABULARY
    assert {name: getattr(tokenizer, name) for name in SPECIAL_IDS} == SPECIAL_IDS
    said = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is a dict?"}], tokenize=False, add_generation_prompt=True
    )
    assert said == "user: What is a dict?\nassistant:"


ALWAYS = ("qwen3", "dsv3", "falconh1")
"""Families with attention, latents and states. Engine tests load checkpoints of the others."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in ALWAYS else pytest.mark.long) for name in FAMILIES]
)
def test_a_checkpoint_is_complete_small_and_the_same_every_time(name: str, tmp_path: Path) -> None:
    torch, safetensors = pytest.importorskip("torch"), pytest.importorskip("safetensors.torch")
    before = torch.random.get_rng_state()
    first, second = (tiny_checkpoint(name, tmp_path / each) for each in "ab")
    assert torch.equal(before, torch.random.get_rng_state())
    assert first.name == second.name
    assert {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"} <= {
        path.name for path in first.iterdir()
    }
    assert sum(path.stat().st_size for path in first.iterdir()) < 24 << 20
    assert (first / "model.safetensors").read_bytes() == (second / "model.safetensors").read_bytes()
    config = json.loads((first / "config.json").read_text())
    assert config["vocab_size"] == VOCABULARY
    assert FAMILIES[name].engine_reads.items() <= config.items()
    weights = safetensors.load_file(first / "model.safetensors")
    matrices = [w.float().std().item() for key, w in weights.items() if key.endswith("proj.weight")]
    assert all(value > 0.9 * FAMILIES[name].scale for value in matrices)
