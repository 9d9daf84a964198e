"""Pages that move whole, or not at all, are forecast as the connector moves them."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvferry.common.errors import ConfigError
from kvferry.engines.vllm.content import Shard, whole_page
from kvferry.engines.vllm.content.adapters import ADAPTERS
from kvferry.tools.models import read_model
from kvferry.tools.models.config import CACHE_DTYPES
from kvferry.tools.models.layout import lay_out_rank
from kvferry.tools.plan import contents as backends
from kvferry.tools.plan.contents import LATENT_INDEXER, lay_out_engine, layer_pages, pages_of
from kvferry.tools.plan.find import find_config
from kvferry.tools.plan.side import EngineSide, resolve_layout, shape
from unit.plan.test_command import DENSE, printed, run
from unit.plan.test_forecast import LATENT, LAYOUTS, planned

UNPROVED = "ROCM_ATTN"
WHOLE = EngineSide(backend=UNPROVED)
SPARSE_BLOCKS, COMPRESSED = "MiniMax-M3", "DeepSeek-V4-Flash"


def of_table(name: str) -> Any:
    return find_config(name)[1]


def side(name: str, **more: Any) -> EngineSide:
    return EngineSide(layout=resolve_layout("auto", read_model(of_table(name))), **more)


def test_the_table_of_backends_equals_that_of_the_docs() -> None:
    page = (Path(__file__).parents[3] / "docs" / "backends.md").read_text()
    lines = [line.strip("|") for line in page.splitlines() if line.startswith("| ")]
    rows = [[cell.strip() for cell in line.split("|")] for line in lines]
    assert [list(row) for row in backends._table()] == rows[2:]


def test_no_element_type_of_a_plan_is_one_whose_pages_move_as_cells() -> None:
    cells = {dtype for row in backends._table() if row.moves_as == "cells" for dtype in row.dtypes.split()}
    assert cells
    assert not cells & set(CACHE_DTYPES)


@pytest.mark.parametrize(
    ("config", "dtype", "found"),
    [
        (DENSE, "auto", "FLASH_ATTN"),
        (DENSE, "float32", "FLASH_ATTN"),
        (DENSE, "fp8", "FLASH_ATTN"),
        (DENSE, "fp8_e5m2", "FLASHINFER"),
        (DENSE, "fp8_per_token_head", "TRITON_ATTN"),
        (LATENT, "auto", "FLASHMLA"),
        (LATENT, "fp8_e4m3", "FLASHMLA"),
        (of_table("DeepSeek-V3.2"), "auto", "FLASHMLA_SPARSE"),
        (of_table("DeepSeek-V3.2"), "fp8_ds_mla", "FLASHMLA_SPARSE"),
        (of_table("DeepSeek-V3.2"), "fp8_e4m3", "FLASHINFER_MLA_SPARSE"),
        (of_table("MiMo-V2-Flash"), "auto", "FLASH_ATTN_DIFFKV"),
    ],
)
def test_pages_of_the_backends_that_vllm_chooses_move_by_fields(config: Any, dtype: str, found: str) -> None:
    pages = [page for page in layer_pages(read_model(config, dtype), EngineSide()) if page is not None]
    assert pages[0].backend == found
    assert {page.backend for page in pages} <= {found, LATENT_INDEXER}
    assert not [page.why_whole for page in pages if page.why_whole]
    assert all(page.backend in ADAPTERS for page in pages)


def test_fields_are_converted_between_engines_that_differ_and_cost_what_they_did() -> None:
    there = EngineSide(2, layout="BHLNC", block_tokens=32)
    plain = planned(DENSE, EngineSide(), there)
    named = planned(DENSE, EngineSide(backend="FLASH_ATTN"), replace(there, backend="TRITON_ATTN"))
    assert not plain.rows[0].whole
    assert plain.notes == named.notes == ()
    assert (plain.whole, plain.rows) == (named.whole, named.rows)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_equal_engines_move_unknown_pages_whole(layout: str) -> None:
    here = replace(WHOLE, layout=layout)
    plain, whole = planned(DENSE, replace(here, backend=None)), planned(DENSE, here)
    assert [row.whole for row in whole.rows] == [True]
    assert (whole.whole.bytes, whole.whole.pages) == (plain.whole.bytes, plain.whole.pages)
    (note,) = whole.notes
    assert note.startswith(f"pages of {UNPROVED} move whole, between engines with equal blocks, layout and")


@pytest.mark.parametrize(
    "there",
    [
        replace(WHOLE, tp=2),
        replace(WHOLE, block_tokens=32),
        replace(WHOLE, layout="LBHNC"),
        EngineSide(),
        EngineSide(backend="A_BACKEND_OF_THEIR_OWN"),
    ],
    ids=["ranks", "blocks", "layout", "backend", "unknown"],
)
def test_unknown_pages_are_refused_between_engines_that_differ(there: EngineSide) -> None:
    for sides in ((WHOLE, there), (there, WHOLE)):
        (why,) = planned(DENSE, *sides).refused
        assert re.search(r"layer 'layers\.0' and 3 more: .*opaque", why)


def test_a_backend_that_writes_another_element_type_is_refused() -> None:
    config, here = DENSE, EngineSide(backend="FLASHINFER")
    there = EngineSide(backend="TRITON_ATTN")
    planned(config, here, there)
    reading = read_model(config, "fp8_e5m2")
    assert lay_out_engine(reading, here, 2)[0].groups[0].layers[0].page.fields[0].name == "k"
    (field, _) = lay_out_engine(reading, there, 2)[0].groups[0].layers[0].page.fields
    assert field.name == "k in float8_e4m3fn"


def test_models_with_layers_of_their_own_move_whole_whatever_is_requested() -> None:
    config, here = of_table(SPARSE_BLOCKS), side(SPARSE_BLOCKS, backend="FLASHINFER")
    assert all(row.whole for row in planned(config, here).rows)
    assert "and 56 more" in " ".join(planned(config, here, replace(here, tp=2)).refused)
    compressed, one = of_table(COMPRESSED), side(COMPRESSED)
    assert all(row.whole for row in planned(compressed, one, replace(one, tp=2)).rows), "ranks hold the same"
    assert planned(compressed, one, replace(one, layout="BLNHC"), tokens=600).refused


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("tp", [1, 2])
def test_unknown_pages_are_described_as_the_connector_describes_them(layout: str, tp: int) -> None:
    reading, engine = read_model(DENSE), EngineSide(tp, layout=layout, backend=UNPROVED)
    (page,) = {layer.page for layer in lay_out_engine(reading, engine, 3)[tp - 1].groups[0].layers}
    where = lay_out_rank(reading.cache, shape(reading, engine, 3), tp - 1, 0).maps[0]
    buffer = torch.zeros(sum((n - 1) * s for n, s in zip(where.counts, where.strides, strict=True)) // 2 + 1)
    tensor = buffer.to(torch.bfloat16).as_strided(
        (*where.counts[1:4], where.counts[4] // 2), (*(stride // 2 for stride in where.strides[1:4]), 1)
    )
    layer = SimpleNamespace(
        get_attn_backend=lambda: SimpleNamespace(get_name=lambda: UNPROVED), kv_cache_dtype="auto"
    )
    theirs = whole_page(
        layer, name="a", spec=SimpleNamespace(max_tp_shards=4), tensor=tensor, num_blocks=3,
        shard=Shard(tp - 1, tp, 0, 4), block_tokens=16, why="for a test",
    )  # fmt: skip
    assert page.opaque
    assert page.block_tokens == theirs.block_tokens
    assert page.page_bytes == theirs.page_bytes
    for mine, other in zip(page.fields, theirs.fields, strict=True):
        assert (mine.item_bytes, mine.offset, mine.axes) == (other.item_bytes, other.offset, other.axes)
    assert "at strides of" in page.content


@pytest.mark.parametrize("name", [SPARSE_BLOCKS, COMPRESSED])
def test_whole_pages_are_kept_in_tiers_as_large_as_they_move(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    said = json.loads(printed(capsys, name, "--json"))
    assert said["tiers"]["why_not"] == ""
    assert {group["moves_as"] for group in said["groups"]} == {"whole pages"}
    (kept,) = (one["content_bytes"] for one in said["tiers"]["groups"] if one["label"] == "mla")
    moved = sum(one["kv_bytes_per_token"] for one in said["groups"] if one["kind"] == "mla")
    assert kept / said["tiers"]["chunk_tokens"] == pytest.approx(moved, rel=0.01)


def test_json_and_table_say_how_pages_move(capsys: pytest.CaptureFixture[str]) -> None:
    said = json.loads(printed(capsys, "Llama-3.1-8B", "--json", "--backend", UNPROVED))
    assert [group["moves_as"] for group in said["groups"]] == ["whole pages"]
    assert said["refused"] == []
    assert (said["source"]["backend"], said["destination"]["backend"]) == (UNPROVED, UNPROVED)
    plain = json.loads(printed(capsys, "Llama-3.1-8B", "--json"))
    assert [group["moves_as"] for group in plain["groups"]] == ["fields"]
    assert plain["bytes"] == said["bytes"]
    table = printed(capsys, "Llama-3.1-8B", "--backend", UNPROVED)
    assert "direct, whole" in table
    assert f"from TP1, layout BHLNC, {UNPROVED}, blocks of 16 tokens" in table
    assert "Note: pages of ROCM_ATTN move whole" in " ".join(table.split())


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit) as exit_code:
        run(*arguments)
    assert exit_code.value.code == 1
    return capsys.readouterr().out


def test_a_refused_transfer_has_reasons_and_no_price(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    flags = ("Llama-3.1-8B", "--backend", UNPROVED, "--to-tp", "2")
    said = json.loads(refused(capsys, *flags, "--json"))
    assert said.keys() == {
        "model", "tokens", "source", "destination", "refused", "notes", "tiers", "fleet", "curve"
    }  # fmt: skip
    (reason,) = said["refused"]
    assert reason.startswith("layer 'layers.0' and 31 more: the peer's pages hold opaque ROCM_ATTN")
    assert said["destination"]["tp"] == 2
    picture = tmp_path / "picture.html"
    text = " ".join(refused(capsys, *flags, "--html", str(picture)).split())
    assert "refused: the destination computes the prompt itself" in text
    assert f"Refused: {reason[:40]}" in text
    assert "moves" not in text.partition("Tiers")[0].partition("Note")[0]
    assert "The picture" not in text
    assert not picture.exists()


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        (("--backend", "FLASHMLA"), "FLASHMLA keeps latent, but this model keeps k and v"),
        (("--to-backend", "B12X"), "B12X does not take layout BHLNC with auto; choose one of LBHNC, BLHNC"),
        (
            ("--backend", "FLASH_ATTN", "--dtype", "fp8_e5m2"),
            "FLASH_ATTN does not take KV cache dtype fp8_e5m2; choose one of auto, float16, bfloat16, fp8",
        ),
    ],
    ids=["kind", "layout", "dtype"],
)
def test_a_backend_that_an_engine_cannot_have_is_an_error(flags: tuple[str, ...], why: str) -> None:
    with pytest.raises(ConfigError) as error:
        run("Llama-3.1-8B", *flags)
    assert str(error.value).startswith(why)


def test_backends_without_a_row_move_whole() -> None:
    found = pages_of("A_BACKEND_OF_THEIR_OWN", "auto", "LBNHC")
    assert found.why_whole == "kvferry does not know this backend"
