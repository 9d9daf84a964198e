"""`kvferry plan` for engines whose ranks divide the tokens of a block."""

from __future__ import annotations

import json
from typing import Any

import pytest
import typer

from kvferry.common.errors import ConfigError
from kvferry.tools.cli.plan import plan
from kvferry.tools.models import ModelReading, read_model
from kvferry.tools.plan.contents import lay_out_engine
from kvferry.tools.plan.find import find_config
from kvferry.tools.plan.side import EngineSide


def reading(model: str, dtype: str = "auto") -> ModelReading:
    name, config = find_config(model)
    return read_model(config, dtype, name=name)


def run(model: str, *arguments: str, **options: Any) -> None:
    app = typer.Typer()
    app.command()(plan)
    given = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
    app([model, *arguments, *given], standalone_mode=False)


def planned(capsys: pytest.CaptureFixture[str], model: str, **options: Any) -> dict[str, Any]:
    run(model, "--json", tokens=4096, **options)
    return json.loads(capsys.readouterr().out)


def test_ranks_that_divide_the_tokens_get_one_copy_of_a_latent_between_them(capsys):
    alone = planned(capsys, "DeepSeek-V3")
    copies = planned(capsys, "DeepSeek-V3", to_tp=8)
    divided = planned(capsys, "DeepSeek-V3", to_tp=8, to_dcp=8)
    half = planned(capsys, "DeepSeek-V3", to_tp=8, to_dcp=4)
    assert copies["bytes"] == 8 * alone["bytes"]
    assert divided["bytes"] == alone["bytes"]
    assert half["bytes"] == 2 * alone["bytes"]
    assert (divided["destination"]["dcp"], divided["destination"]["block_size"]) == (8, 128)
    assert (divided["source"]["dcp"], divided["source"]["block_size"]) == (1, 16)


def test_ranks_with_copies_of_a_head_divide_its_tokens(capsys):
    alone = planned(capsys, "Llama-3.1-8B", tp=8)
    copies = planned(capsys, "Llama-3.1-8B", tp=8, to_tp=32)
    divided = planned(capsys, "Llama-3.1-8B", tp=8, to_tp=32, to_dcp=4)
    assert copies["bytes"] == 4 * alone["bytes"]
    assert divided["bytes"] == alone["bytes"]
    ranks = lay_out_engine(reading("Llama-3.1-8B"), EngineSide(tp=32, dcp=4, turn_tokens=8), 2)
    held = set()
    for rank in ranks:
        page = rank.groups[0].layers[0].page
        assert (page.block_tokens, rank.groups[0].block_tokens, page.interleave.size) == (64, 64, 8)
        (_, first, last), *_ = page.fields[0].held
        held.add((first, last, page.interleave.rank))
    assert held == {(head, head + 1, part) for head in range(8) for part in range(4)}


def test_longer_turns_leave_longer_runs(capsys):
    runs = [
        planned(capsys, "DeepSeek-V3", to_tp=8, to_dcp=8, to_interleave=turn)["run_bytes"]
        for turn in (1, 4, 16)
    ]
    assert runs == [runs[0], 4 * runs[0], 16 * runs[0]]
    same = planned(capsys, "DeepSeek-V3", tp=8, dcp=8, interleave=4)
    assert same["run_bytes"] == 16 * runs[0], "engines that divide alike move whole blocks"


def test_the_tiers_are_the_same_with_and_without_context_parallelism(capsys):
    divided, alone = (planned(capsys, "DeepSeek-V3", tp=8, dcp=dcp)["tiers"] for dcp in (8, 1))
    assert divided == alone


def test_the_engines_are_shown_with_their_context_parallelism(capsys):
    run("DeepSeek-V3", tp=8, dcp=8, interleave=16, to_tp=1, to_dcp=1, to_interleave=1)
    lines = capsys.readouterr().out.splitlines()
    assert lines[2] == "from TP8, DCP8 in turns of 16, layout LBNHC, blocks of 128 tokens"
    assert lines[3] == "to TP1, layout LBNHC, blocks of 16 tokens"


@pytest.mark.parametrize(
    ("model", "backend", "tp"), [("DeepSeek-V3", "CUTLASS_MLA", 8), ("Llama-3.1-8B", "ROCM_ATTN", 32)]
)
def test_pages_that_move_whole_need_equal_turns(capsys, model, backend, tp):
    options = {"backend": backend, "tp": tp, "dcp": 4, "interleave": 4}
    equal = planned(capsys, model, **options)
    assert [group["moves_as"] for group in equal["groups"]] == ["whole pages"]
    assert (
        equal["bytes"]
        == planned(capsys, model, **options | {"backend": "TRITON_MLA" if tp == 8 else "TRITON_ATTN"})[
            "bytes"
        ]
    )
    for other in ({"to_interleave": 8}, {"to_dcp": 2}):
        with pytest.raises(SystemExit):
            planned(capsys, model, **options, **other)
        assert json.loads(capsys.readouterr().out)["refused"]


@pytest.mark.parametrize(
    ("model", "options", "says"),
    [
        ("DeepSeek-V3", {"tp": 8, "dcp": 3}, "dcp is 3; it must divide tp, which is 8"),
        ("DeepSeek-V3", {"tp": 8, "dcp": 0}, "dcp is 0, it must be at least 1"),
        ("DeepSeek-V3", {"tp": 8, "dcp": 2, "interleave": 3}, "must divide the 16 tokens of a rank's block"),
        ("Llama-3.1-8B", {"tp": 8, "dcp": 2}, "with 8 KV heads, vLLM takes at most 1"),
        ("Llama-3.1-8B", {"tp": 32, "dcp": 8}, "with 8 KV heads, vLLM takes at most 4"),
        ("gemma-3-27b-it", {"tp": 32, "dcp": 2}, "vLLM divides no tokens of a model with sliding_window"),
        ("Qwen3-Next-80B-A3B", {"tp": 4, "dcp": 2}, "vLLM divides no tokens of a model with state"),
        ("DeepSeek-V4-Flash", {"tp": 8, "dcp": 8}, "vLLM divides no tokens of a model with"),
    ],
)
def test_what_vllm_refuses_is_refused_in_one_sentence(model, options, says):
    with pytest.raises(ConfigError, match=says):
        run(model, **options)
