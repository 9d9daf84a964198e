"""Engines in bfloat16 are not started on a CPU on which vLLM's attention over it fails."""

from __future__ import annotations

import signal

import pytest

from kvferry.common.errors import ConfigError
from kvferry.tools.serving import machine_checks as cpu_attention
from kvferry.tools.serving.machine_checks import bfloat16_fault
from kvferry.tools.serving.specs import fleet_specs
from support.command_line import run_kvferry

FAULT = "vLLM's attention over bfloat16 ends an engine on this CPU with signal 4 (SIGILL)"


class Trial:
    """A trial of attention that ends with a code, and counts how often it was made."""

    def __init__(self, code: int) -> None:
        self.code, self.made = code, 0

    def __call__(self) -> int:
        self.made += 1
        return self.code


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(cpu_attention, "vllm_is_for_cpu", lambda: True)


def processor(folder, flags: str):
    path = folder / "cpuinfo"
    path.write_text(f"processor : 0\nflags\t\t: fpu {flags}\n")
    return path


def test_a_failed_trial_is_a_sentence_and_is_remembered_for_this_processor(tmp_path):
    trial = Trial(-signal.SIGILL)
    amx = processor(tmp_path, "amx_bf16 amx_tile")
    assert [bfloat16_fault(trial, amx) for _ in range(2)] == [FAULT, FAULT]
    assert trial.made == 1
    assert bfloat16_fault(trial, processor(tmp_path, "amx_tile")) == FAULT
    assert trial.made == 2


@pytest.mark.parametrize("code", [0, 1])
def test_attention_that_works_or_cannot_be_tried_is_no_fault(tmp_path, code):
    assert bfloat16_fault(Trial(code), processor(tmp_path, "amx_tile")) == ""


def test_a_processor_without_amx_needs_no_trial(tmp_path):
    trial = Trial(-signal.SIGILL)
    assert bfloat16_fault(trial, processor(tmp_path, "avx512f")) == ""
    assert trial.made == 0


def test_the_trial_is_vllms_attention_and_runs_here(monkeypatch):
    """On every processor: the trial itself must not be what fails."""
    assert cpu_attention._compute() in (0, -signal.SIGILL)


@pytest.mark.parametrize(
    ("arguments", "refused"),
    [
        ((), True),
        (("--dtype", "bfloat16"), True),
        (("--dtype=auto",), True),
        (("--dtype=float32",), False),
        (("--dtype", "half"), False),
    ],
)
def test_a_fleet_in_bfloat16_is_refused_with_a_remedy(monkeypatch, tmp_path, arguments, refused):
    monkeypatch.setattr(cpu_attention, "bfloat16_fault", lambda: FAULT)
    if refused:
        with pytest.raises(ConfigError) as caught:
            fleet_specs("m", arguments=arguments)
        assert str(caught.value) == f"{FAULT}; add --dtype float32 to the engine's arguments"
    else:
        fleet_specs("m", arguments=arguments)


def test_config_notes_the_fault_beside_its_output(monkeypatch):
    monkeypatch.setattr(cpu_attention, "bfloat16_fault", lambda: FAULT)
    done = run_kvferry("config")
    assert (done.returncode, done.stdout.count("\n")) == (0, 1)
    assert done.stderr == f"kvferry: note: {FAULT}; add --dtype float32 to the engine's arguments\n"
