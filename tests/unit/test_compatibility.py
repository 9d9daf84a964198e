"""docs/compatibility.md says what its data say, and every test that they name exists."""

from __future__ import annotations

import ast
import re
import tomllib
from pathlib import Path

import pytest

from support.long.run import parts
from support.vllm_engine.runners import VARIABLE

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "compatibility.md"
README = (ROOT / "README.md").read_text()
DATA = tomllib.loads((ROOT / "docs" / "compatibility.toml").read_text())
COLUMNS = ("transfer", "other TP", "other block size", "tiers", "speculative")
SETTINGS = {"V1": "V1", "V2": "V2", "Triton": "Triton backend", "weights": "real weights"}
"""Of engines of tests: its name in the data, and its column."""
SAID = {
    "engine": "CPU engine",
    "plan": "planned",
    "manager": "cache manager",
    "": "not yet",
    "refused": "refused",
}
HEAD = """# What works with which models

Reference: what works with which model family, and how that was proved. The numbers name the tests below the
table. Nothing in it was proved on a GPU.

- *CPU engine*: real vLLM engines on a CPU move, or store and load, the KV of a tiny random checkpoint. The
  test compares bytes, state or answers with those of a single engine. [More about these engines](#engines).
- *planned*: vLLM's own classes of the family, in full size, agree with kvferry's geometry, or the planner
  gives every rank what it needs at TP 1 to 16. No test runs an engine for this feature.
- *cache manager*: vLLM's own cache manager allocates blocks for the family's kinds of state, and kvferry
  offers and loads the right ones. A fake worker stands for the model.
- *refused*: kvferry refuses it, and says why.
- *not yet*: no test proves it. It may work.

"""
ENGINES = """## Engines

The tests above that ran with engines, by what those engines were:

- *V1*: vLLM's first model runner, on the attention backend for CPUs, with random weights.
- *V2*: vLLM's second model runner, the default on GPUs, with asynchronous scheduling. Triton's interpreter
  runs its kernels.
- *Triton backend*: TRITON_ATTN and TRITON_MLA, attention backends of GPUs, with their layouts. Triton's
  interpreter runs their kernels.
- *real weights*: a trained model answers questions. The answers must be right, and wrong if a block is
  spoiled.

"""
OTHERWISE = """## What else may differ between two engines

Real vLLM engines on a CPU handed these over: the bytes are the producer's, the answer is a single engine's,
and a spoiled block changes it. Three tests change what vLLM's CPU build says of itself:

- cross-layer layouts: its backends declare the layouts that their kernels can read. With MLA, the Python
  that writes latents follows the strides too.
- kernel blocks: its kernels declare that they take blocks of 32 tokens only (16 with MLA), so that vLLM
  splits larger ones. Its runner zeroes all kernel blocks of a new block, as on a GPU.
- host buffer: its operation that copies blocks works between two places in host memory.

"""

CONTEXT = """## Context parallelism

KV moves between engines whose ranks divide the tokens of a block (vLLM's `--decode-context-parallel-size`,
DCP), in turns of any length (`--cp-kv-cache-interleave-size`), and engines that do not, or divide them in
another way. Tensor parallelism, pipeline parallelism, block size and layout may differ too, and stored
chunks are the same. Pages that move whole need equal DCP and equal turns.

vLLM's attention backends for CPUs refuse DCP, and its slots for them assert that there is none. So engines
with it ran TRITON_MLA in the second model runner, by Triton's interpreter.

- A tiny DeepSeek V3 with DCP 2, to and from one rank with other blocks:
  `tests/engine/test_context_parallel.py`.
- Tokens lie where vLLM's functions say, in both model runners:
  `tests/unit/engines/test_context_parallel.py`.
- Any two engines, over NIXL between processes: `tests/transport/test_bytes.py`; compared with a mover that
  copies element by element: `tests/unit/planning/test_oracle.py`; chunks that they store and load:
  `tests/unit/planning/test_canonical_oracle.py`.

Prefill context parallelism (`--prefill-context-parallel-size`, PCP) works only together with DCP, and no
engine with it has run. Alone it is refused: all its ranks have the same KV, and vLLM's scheduler learns of
one of them only. A ring (`CircularBufferSpec`) with DCP is refused, because vLLM does not say which of its
entries a rank has.

"""


def cell(said: str, numbers: dict[str, int]) -> str:
    """One cell, with the number of its footnote."""
    how, _, proof = said.partition(":")
    return SAID[how] + (f" [{numbers[proof]}]" if proof else "")


def proofs_of(family: str, setting: str) -> list[str]:
    """Names of the proofs of a family that ran with engines of a setting, in the order of `proofs`."""
    names = DATA["settings"].get(family, {}).get(setting)
    # An empty list says that the engines of the table were others.
    of_table = DATA["families"][family] if setting == "V1" and names != [] else []
    names = names or []
    return [name for name in DATA["proofs"] if name in names or f"engine:{name}" in of_table]


def page() -> str:
    """The page, from the data."""
    numbers = {name: number for number, name in enumerate(DATA["proofs"], 1)}
    lines = [f"| family | {' | '.join(COLUMNS)} |", "|---" * (len(COLUMNS) + 1) + "|"]
    for family, cells in DATA["families"].items():
        lines.append(f"| {family} | {' | '.join(cell(each, numbers) for each in cells)} |")
    notes = [f"{numbers[name]}. `{proof}`" for name, proof in DATA["proofs"].items()]
    of_engines = ["| what | models | shown by |", "|---|---|---|"]
    for what, (models, proof) in DATA["engines"].items():
        of_engines.append(f"| {what} | {models} | [{numbers[proof]}] |")
    of_settings = [f"| family | {' | '.join(SETTINGS.values())} |", "|---" * (len(SETTINGS) + 1) + "|"]
    for family in DATA["families"]:
        if any(ran := [proofs_of(family, setting) for setting in SETTINGS]):
            found = [" ".join(f"[{numbers[name]}]" for name in names) or SAID[""] for names in ran]
            of_settings.append(f"| {family} | {' | '.join(found)} |")
    tables = [[*lines, "", *notes], of_settings, of_engines]
    heads = (HEAD, ENGINES, OTHERWISE)
    text = [head + "\n".join(table) for head, table in zip(heads, tables, strict=True)]
    return "\n\n".join([*text, CONTEXT.rstrip(), DATA["releases"]["text"]])


def test_the_page_says_what_the_data_say():
    assert PAGE.read_text() == page(), (
        "run .venv/bin/python tests/unit/test_compatibility.py, which writes docs/compatibility.md"
    )


@pytest.mark.parametrize("proof", DATA["proofs"].values())
def test_every_test_that_proves_something_exists(proof):
    file, _, name = proof.partition("::")
    tree = ast.parse((ROOT / file).read_text())
    tests = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    assert name in tests, f"{file} has no test {name}; change docs/compatibility.toml"


def test_settings_are_of_known_families_and_shown_by_engines():
    assert DATA["settings"].keys() <= DATA["families"].keys()
    for settings in DATA["settings"].values():
        assert settings.keys() <= SETTINGS.keys()
        for name in [name for names in settings.values() for name in names]:
            assert DATA["proofs"][name].startswith("tests/engine/")


def test_every_file_whose_tests_prove_something_of_the_second_runner_is_run_with_it():
    run = {
        argument
        for part in parts().values()
        if part.environment.get(VARIABLE) == "2"
        for argument in part.command
    }
    files = {
        DATA["proofs"][name].partition("::")[0]
        for of in DATA["settings"].values()
        for name in of.get("V2", [])
    }
    assert files <= run


def test_everything_else_that_may_differ_is_shown_by_engines():
    proofs = [DATA["proofs"][proof] for _, proof in DATA["engines"].values()]
    assert all(proof.startswith("tests/engine/") for proof in proofs)


def test_readme_names_all_families_that_engines_handed_over_and_no_other():
    (named,) = re.findall(r"handed over between real vLLM engines,(.*?)\. The two", README, re.DOTALL)
    models = [name for names in re.findall(r"\(([^)]*)\)", named) for name in names.split(", ")]
    shown = [family for family, (transfer, *_) in DATA["families"].items() if transfer.startswith("engine:")]
    assert all(any(model in family for family in shown) for model in models)
    assert {re.split(r",| \(", family)[0] for family in shown} <= {*models}


@pytest.mark.parametrize("family", DATA["families"])
def test_every_cell_is_said_and_proved_by_the_kind_of_test_that_it_claims(family):
    cells = DATA["families"][family]
    assert len(cells) == len(COLUMNS)
    for said in cells:
        how, _, proof = said.partition(":")
        assert how in SAID
        assert bool(proof) is (how in ("engine", "plan", "manager"))
        if proof:
            assert DATA["proofs"][proof].startswith("tests/engine/") is (how == "engine")


if __name__ == "__main__":
    PAGE.write_text(page())
