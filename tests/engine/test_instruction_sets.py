"""Files that an engine wrote with one instruction set, read by an engine with another."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.processor import needs_avx512
from support.vllm_engine.inside import distance
from support.vllm_engine.pair import prompt
from support.vllm_engine.tiered import Tiered, chunk_files, spoil

pytestmark = [pytest.mark.engine, pytest.mark.long, needs_avx512]

WITHOUT_AVX512 = {"without_avx512": True}
"""vLLM loads its library for AVX2."""


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("first", "second"), [({}, WITHOUT_AVX512), (WITHOUT_AVX512, {})], ids=["to-avx2", "to-avx512"]
)
def test_files_of_one_instruction_set_are_read_by_another(
    first: dict, second: dict, dtype: str, running: object, checkpoints: Path, tmp_path: Path
) -> None:
    running.close()

    def start(name: str, options: dict) -> Tiered:
        chunks, options = tmp_path / "chunks", {**options, "dtype": dtype}
        # A new interpreter: a process that has loaded one library cannot load another one.
        return Tiered("gemma3", checkpoints, chunks, tmp_path / name, options, fresh=True)

    text = prompt(512, 61)
    writer = start("writer", first)
    try:
        asked, said = writer.own_words(text)
        libraries = writer.engine.call("operations")
    finally:
        writer.close()
    reader = start("reader", second)
    try:
        libraries += reader.engine.call("operations")
        assert len(libraries) == 2
        assert "_C_AVX2" in libraries
        assert libraries[0] != libraries[1]
        answer = reader.say(asked)
        assert answer["hit"] == [len(text)]
        near = distance(answer, said)
        for paths in chunk_files(tmp_path / "chunks").values():
            for path in paths:
                spoil(path, with_checksum=True)
        reader.forget(host=True)
        spoiled = reader.say(asked)
        assert spoiled["hit"] == [len(asked)], "it stored what it was asked"
        assert near < (1e-4 if dtype == "float32" else distance(spoiled, said) / 4)
        assert distance(spoiled, said) > 1e-2
    finally:
        reader.close()
