"""`kvferry plan`: what it prints, and that what cannot be planned is refused in one sentence."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from kvferry.common.errors import ConfigError, KVFerryError
from kvferry.tools.cli.plan import plan

DENSE = {
    "model_type": "llama", "num_hidden_layers": 4, "hidden_size": 128, "num_attention_heads": 8,
    "num_key_value_heads": 4, "torch_dtype": "bfloat16",
}  # fmt: skip


def run(*arguments: str) -> None:
    app = typer.Typer()
    app.command()(plan)
    app([*arguments], standalone_mode=False)


def printed(capsys, *arguments: str) -> str:
    run(*arguments)
    return capsys.readouterr().out


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "tiny" / "config.json"
    path.parent.mkdir()
    path.write_text(json.dumps(DENSE))
    return path


@pytest.mark.parametrize(
    ("model", "arguments"),
    [
        ("Llama-3.1-405B", ("--to-tp", "8", "--tokens", "1000000", "--bandwidth", "0.5")),
        ("gemma-3-27b-it", ("--to-tp", "2", "--to-layout", "BLHNC", "--pp", "2")),
        ("Kimi-K3", ("--tokens", "1000000")),
        (
            "DeepSeek-V3.2",
            (
                "--tp",
                "16",
            ),
        ),
        ("Nemotron-3-Super-120B-A12B", ("--to-tp", "2")),
    ],
)
def test_the_output_fits_80_columns(capsys, monkeypatch, model, arguments):
    monkeypatch.setenv("COLUMNS", "80")
    out = printed(capsys, model, *arguments)
    assert max(map(len, out.splitlines())) <= 80
    # A cell that does not fit would end in an ellipsis.
    assert "…" not in out


def test_a_line_per_kind_of_layer(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    lines = printed(capsys, "gemma-3-27b", "--layout", "nhd").splitlines()
    assert re.fullmatch(r"moves 736 MiB in about \S+ ms: 37% of what full attention would take", lines[1])
    assert [lines[0], *lines[2:5]] == [
        "gemma-3-27b-it, a prompt of 4,096 tokens",
        "from TP1, layout LBNHC, blocks of 16 tokens",
        "to an engine with the same settings",
        "KV cache: 496 KiB per token",
    ]
    rows = [line for line in lines if " direct " in line]
    assert re.match(r"52 window 1,024 +416 KiB +128 KiB +3,328 +416 MiB +25% +direct ", rows[0])
    assert re.match(r"10 full attention +80 KiB +128 KiB +2,560 +320 MiB +100% +direct ", rows[1])
    assert re.match(r"all +- +128 KiB +5,888 +736 MiB +37% +direct ", rows[2])


def test_a_note_explains_a_derived_block_size(capsys):
    out = " ".join(printed(capsys, "qwen3-next-80b-a3b", "--to-tp", "4").split())
    assert "from TP1, layout BLHNC, blocks of 544 tokens to TP4, layout BLHNC, blocks of 272" in out
    assert "Note: blocks of 544 tokens at TP1: vLLM makes a page of attention" in out


JSON_KEYS = {
    "model", "tokens", "source", "destination", "kv_bytes_per_token", "state_bytes", "page_bytes",
    "to_page_bytes", "pages", "descriptors", "bytes", "full_attention_bytes", "run_bytes", "block_run_bytes",
    "strategy", "read_descriptors", "read_bytes", "seconds", "groups", "refused", "notes", "tiers",
    "fleet", "curve",
}  # fmt: skip
OF_THE_WHOLE = {"model", "source", "destination", "groups", "refused", "notes", "tiers", "fleet", "curve"}
GROUP_KEYS = JSON_KEYS - OF_THE_WHOLE | {
    "kind", "attention_span", "fields", "layers", "block_tables", "moves_as",
}  # fmt: skip

TIER_KEYS = {
    "prompt_tokens", "chunk_tokens", "first_tokens", "groups", "settings", "why_not", "label", "layers",
    "content_bytes", "chunk_bytes", "file_bytes", "snapshot", "prefix_cache_retention_interval",
    "max_num_batched_tokens", "snapshot_tokens", "snapshots", "bytes", "gap_tokens",
    "first_snapshot_tokens", "shared_prefixes",
}  # fmt: skip


def test_json_has_every_number_for_the_whole_and_for_each_group(capsys, config):
    said = json.loads(
        printed(capsys, str(config), "--tokens", "160", "--json", "--layout", "LBNHC", "--strategy", "direct")
    )
    assert said.keys() == JSON_KEYS
    (group,) = said["groups"]
    assert group.keys() == GROUP_KEYS
    undivided = {"tp": 1, "pp": 1, "dcp": 1, "interleave": 1}
    assert said["source"] == {**undivided, "block_size": 16, "layout": "LBNHC", "backend": None}
    expected = {
        "kv_bytes_per_token": 1024, "state_bytes": 0, "page_bytes": 4096, "to_page_bytes": 4096, "pages": 40,
        "descriptors": 40, "bytes": 163840, "full_attention_bytes": 163840, "run_bytes": 4096,
        "block_run_bytes": 4096, "strategy": "direct", "read_descriptors": 40, "read_bytes": 163840,
    }  # fmt: skip
    assert {key: said[key] for key in expected} == {key: group[key] for key in expected} == expected
    assert (group["kind"], group["attention_span"], group["layers"], group["tokens"]) == (
        "full_attention",
        0,
        4,
        159,
    )
    assert (group["fields"], group["block_tables"]) == (["k", "v"], 1)
    assert 0 < said["seconds"] == group["seconds"] < 1


def test_json_has_what_the_tiers_keep(capsys):
    tiers = json.loads(printed(capsys, "Qwen3-Next-80B-A3B", "--json", "--kept-tokens", "8192"))["tiers"]
    assert {*tiers, *tiers["groups"][0], *tiers["settings"][0]} == TIER_KEYS
    assert (tiers["chunk_tokens"], tiers["first_tokens"], tiers["why_not"]) == (136, 544, "")
    # 60 chunks of 136 tokens of 24 KiB and snapshots of 37.69 MiB, each with a page of header.
    attention, state = 60 * (136 * 24576 + 4096), 39518208 + 4096
    # At 1,088, 2,176, 4,352 and 8,160; with steps of 1,632 also at 3,808, 5,984 and 7,616.
    assert [(s["snapshots"], s["bytes"]) for s in tiers["settings"]] == [
        (count, attention + count * state) for count in (4, 7, 15)
    ]


def test_table_and_json_have_the_tokens_loaded_of_a_shared_prefix(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    qwen = ("Qwen3-Next-80B-A3B", "--tp", "4")
    table = printed(capsys, *qwen).partition("of a prefix that they share, if all is stored\n")[2]
    assert [line.split() for line in table.splitlines()[2:5]] == [
        ["2,048", "1,088", "1,088", "1,088", "0"],
        ["8,192", "4,352", "8,160", "1,088", "0"],
        ["32,768", "17,408", "32,640", "1,088", "0"],
    ]
    tiers = json.loads(printed(capsys, *qwen, "--json", "--first-snapshot-tokens", "0"))["tiers"]
    assert tiers["first_snapshot_tokens"] == 0
    assert [[*one.values()] for one in tiers["shared_prefixes"]] == [
        [2048, 0, 0, 0], [8192, 0, 0, 0], [32_768, 0, 0, 0]
    ]  # fmt: skip
    assert "prefix that they share" not in printed(capsys, "Llama-3.1-8B")


def test_the_tiers_are_a_table_of_settings(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    out = printed(capsys, "Qwen3-Next-80B-A3B", "--retention", "none", "--step-tokens", "1632")
    assert "Tiers: chunks of 136 tokens, snapshots at least 544 tokens apart\n" in out
    said = [line.split() for line in out.partition("prompt of 131,072 tokens, by settings\n")[2].splitlines()]
    assert said[-11:-9] == [
        ["None", "1,632", "84", "6.09", "GiB", "1,632"],
        ["None", "544", "240", "11.84", "GiB", "544"],
    ]


def test_a_prompt_shorter_than_every_loadable_prefix_is_reported(capsys):
    out = " ".join(printed(capsys, "Qwen3-Next-80B-A3B", "--kept-tokens", "500").split())
    assert "No prefix can be loaded: the shortest loadable prefix has 544 tokens, the prompt has 500." in out


def test_every_key_of_the_json_is_documented():
    text = (Path(__file__).parents[3] / "docs" / "plan.md").read_text()
    assert not [key for key in JSON_KEYS | GROUP_KEYS | TIER_KEYS if f"`{key}`" not in text]


def test_flags_of_the_side_that_gets_it_follow_those_of_the_other(capsys, config):
    said = json.loads(
        printed(
            capsys, str(config), "--json", "--tp", "2", "--pp", "2", "--block-size", "32",
            "--layout", "bhlnc", "--to-tp", "4",
        )
    )  # fmt: skip
    alike = {"pp": 2, "dcp": 1, "interleave": 1, "block_size": 32, "layout": "BHLNC", "backend": None}
    assert said["source"] == {"tp": 2, **alike}
    assert said["destination"] == {"tp": 4, **alike}


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        ("Llama-3.1-8B", "BHLNC"),
        ("gemma-3-27b", "BLHNC"),
        ("Qwen3-Next-80B-A3B", "BLHNC"),
        ("DeepSeek-V3", "LBNHC"),
    ],
)
def test_the_layout_is_the_connectors_unless_another_is_asked_for(capsys, model, layout):
    said = json.loads(printed(capsys, model, "--json", "--to-layout", "LBNHC"))
    assert (said["source"]["layout"], said["destination"]["layout"]) == (layout, "LBNHC")
    said = json.loads(printed(capsys, model, "--json", "--layout", "LBNHC", "--to-layout", "auto"))
    assert (said["source"]["layout"], said["destination"]["layout"]) == ("LBNHC", layout)


def test_names_of_layouts_that_engines_use_are_understood(capsys, config):
    said = json.loads(printed(capsys, str(config), "--json", "--layout", "HND", "--to-layout", "nhd"))
    assert (said["source"]["layout"], said["destination"]["layout"]) == ("LBHNC", "LBNHC")


def test_a_folder_and_a_file_are_the_same_model(capsys, config):
    assert printed(capsys, str(config), "--json") == printed(capsys, str(config.parent), "--json")
    assert json.loads(printed(capsys, str(config.parent), "--json"))["model"] == "tiny"


def test_the_table_is_listed_with_sources(capsys):
    out = " ".join(printed(capsys, "--list").split())
    assert "gpt-oss-20b: 12 window 128, 12 full attention" in out
    assert "github.com/ai-dynamo/aiconfigurator" in out
    models = {one["name"]: one for one in json.loads(printed(capsys, "--list", "--json"))}
    assert models["gpt-oss-20b"]["layers"] == [
        {"count": 12, "kind": "window 128"},
        {"count": 12, "kind": "full attention"},
    ]
    assert "Qwen2.5-3B-Instruct" in models["Qwen2.5-3B"]["also"]
    assert "github.com/ai-dynamo/aiconfigurator" in models["DeepSeek-R1"]["source"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((), "MODEL is missing"),
        (("lama-3.1-8b",), "no model is called 'lama-3.1-8b'; did you mean Llama-3.1-8B or "),
        (("zzzzzz",), "no model is called 'zzzzzz'; run `kvferry plan --list`"),
        (("./nowhere/config.json",), "cannot read nowhere/config.json: No such file or directory; give"),
        (("Llama-3.1-8B", "--tokens", "0"), "--tokens is 0; a prompt has at least 1"),
        (("Llama-3.1-8B", "--tokens", "0"), "--tokens is 0"),
        (("Llama-3.1-8B", "--layout", "BNLHC"), "layout 'BNLHC' is not known; choose one of auto, LBNHC"),
        (("Llama-3.1-8B", "--to-layout", "x"), "layout 'x' is not known"),
        (("Llama-3.1-8B", "--tp", "3"), "8 heads on 3 tensor-parallel ranks: choose a size that divides 8"),
        (("Llama-3.1-8B", "--tp", "0"), "tp is 0, it must be at least 1"),
        (("Llama-3.1-8B", "--to-tp", "0"), "tp is 0, it must be at least 1"),
        (("Llama-3.1-8B", "--pp", "33"), "32 layers on 33 pipeline ranks"),
        (("Llama-3.1-8B", "--block-size", "0"), "block size is 0"),
        (("Llama-3.1-8B", "--to-block-size", "0"), "block size is 0"),
        (("Llama-3.1-8B", "--dtype", "int2"), "element type 'int2' is not known"),
        (("Llama-3.1-8B", "--kv", "sideways"), "--kv sideways is not known; choose packed or apart"),
        (
            ("Llama-3.1-8B", "--strategy", "teleport"),
            "strategy 'teleport' is not known; choose one of auto, direct",
        ),
        (("Llama-3.1-8B", "--bandwidth", "0"), "bandwidth is 0.0 GB/s, it must be above 0"),
        (("Llama-3.1-8B", "--mtp"), "names no multi-token prediction layers"),
        (("Llama-3.1-8B", "--html", "/nowhere/x.html"), "cannot write /nowhere/x.html: No such file"),
        (
            ("Llama-3.1-8B", "--html", "/nowhere/x", "--trace", "missing"),
            "cannot write /nowhere/x: No such file",
        ),
    ],
)
def test_an_impossible_plan_is_refused_in_one_sentence(arguments, says):
    with pytest.raises(KVFerryError) as raised:
        run(*arguments)
    assert says in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"{", "is not JSON: Expecting property name"),
        (b"\xff\xfe", "is not JSON: "),
        (b"[1]", "holds a list, an object with a model's settings is expected"),
        (b"{}", "config.json has no num_attention_heads"),
        (b"[" * 100_000, "is not JSON: "),
    ],
)
def test_a_file_that_is_no_config_is_refused_in_one_sentence(tmp_path, content, says):
    path = tmp_path / "config.json"
    path.write_bytes(content)
    with pytest.raises(ConfigError) as raised:
        run(str(path))
    assert says in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_folder_without_a_config_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"config\.json: No such file"):
        run(str(tmp_path))


@pytest.mark.slow
def test_an_id_of_the_hub_without_a_hub_is_one_sentence(monkeypatch, tmp_path):
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    with pytest.raises(ConfigError, match="'someone/else' is not in the built-in table, and ") as raised:
        run("someone/else")
    assert "\n" not in str(raised.value)
    assert "give the path of its config.json" in str(raised.value)


def test_a_user_sees_no_traceback_and_an_exit_code():
    command = [
        sys.executable,
        "-c",
        "from kvferry.tools.cli.main import main; main()",
        "plan",
        "nothing-like-it",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("kvferry: no model is called 'nothing-like-it'")
    assert len(done.stderr.splitlines()) == 1


def test_importing_the_command_is_light():
    code = (
        "import sys, kvferry.tools.cli.plan; print(*(m for m in sys.modules if m in ('numpy', 'rich.table')))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


def test_the_page_has_the_tables_of_the_storage(tmp_path, capsys):
    shown = printed(capsys, "Qwen3-Next-80B-A3B", "--html", str(tmp_path / "page.html"))
    page = (tmp_path / "page.html").read_text().partition("Storage in the tiers")[2]
    for table in (
        "Tiers: chunks of",
        "Storage for a prompt of 131,072 tokens",
        "Tokens that prompts load of",
    ):
        assert table in shown
        assert table in page
