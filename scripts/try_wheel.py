"""Install a wheel of kvferry with its core dependencies only, and run the commands that need no engine.

    python scripts/try_wheel.py dist/kvferry-0.1.0-py3-none-any.whl

The packages come from the package index. The exit code is 1 if a command does not do what is expected.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

NOT_IN_THE_CORE = ("matplotlib", "nixl", "starlette", "torch", "transformers", "uvicorn", "vllm")
NO_ENGINE = "http://127.0.0.1:9"
"""Address of the discard service, where no engine listens."""
MODEL = {
    "model_type": "qwen3",
    "hidden_size": 1024,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "torch_dtype": "bfloat16",
}


@dataclass(frozen=True, slots=True)
class Trial:
    """A command to run, and its expected result.

    Attributes:
        arguments: arguments of `kvferry`, separated by spaces.
        code: expected exit code.
        expected: text that the output must contain.
    """

    arguments: str
    code: int
    expected: str


TRIALS = (
    Trial("--help", 0, "explain"),
    Trial("plan config.json", 0, "28 full attention"),
    Trial("plan nobody/nothing", 2, "the Hugging Face hub cannot be reached"),
    Trial("config --role prefill", 0, '"kv_role":"kv_producer"'),
    Trial('config --tiers [{"type":"host","capacity":"1MiB"}]', 0, '"capacity":"1MiB"'),
    Trial('config --tiers [{"type":"file","path":"/nope"}]', 2, "/nope does not exist"),
    Trial("keygen secret", 0, "fingerprint"),
    Trial("doctor --no-machine --config kv.json", 0, "kv.json"),
    Trial(f"doctor --no-machine {NO_ENGINE}", 1, "refused"),
    Trial(f"top --once {NO_ENGINE}", 1, "no answer"),
    Trial("explain", 1, "no engine of this user runs on this machine"),
    Trial("cache ls .", 2, "is not a cache of kvferry"),
    Trial("top --dashboard .", 0, "kvferry-alerts.yaml"),
    Trial("serve model", 2, "install kvferry's extra vllm"),
    Trial("demo", 2, "install kvferry's extra vllm"),
    Trial(f"router --prefill {NO_ENGINE} --decode {NO_ENGINE}", 2, "install kvferry's extra router"),
    Trial("bench tiers", 2, "install kvferry's extra bench"),
)


def try_wheel(wheel: Path) -> list[str]:
    """Install a wheel in a new environment, and run all trials there.

    Args:
        wheel: path of the wheel.

    Returns:
        One text per problem; empty if all commands do what is expected.

    Raises:
        CalledProcessError: the wheel cannot be installed.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        environment, work = folder / "environment", folder / "work"
        work.mkdir()
        (work / "config.json").write_text(json.dumps(MODEL))
        (work / "kv.json").write_text(json.dumps({"load_timeout_seconds": 20}))
        _uv("venv", "--python", sys.executable, str(environment))
        python = environment / "bin" / "python"
        _uv("pip", "install", "--python", str(python), str(wheel))
        problems = _heavy_packages(python)
        kvferry = [str(environment / "bin" / "kvferry")]
        problems += [each for trial in TRIALS for each in _problems(trial, kvferry, work)]
        from_index = ["uv", "tool", "run", "--python", sys.executable, "--from", str(wheel), "kvferry"]
        return problems + _problems(TRIALS[1], from_index, work)


def _uv(*arguments: str) -> None:
    subprocess.run(["uv", *arguments, "--quiet"], check=True, env=_environment())  # noqa: S607


def _environment() -> dict[str, str]:
    """Return environment variables for a clean environment, in which the Hugging Face hub does not answer."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "PYTHON"))}
    here = str(Path(sys.executable).parent)  # has uv
    return {**kept, "HF_ENDPOINT": NO_ENGINE, "COLUMNS": "200", "PATH": f"{here}:{kept.get('PATH', '')}"}


def _heavy_packages(python: Path) -> list[str]:
    code = f"from importlib.util import find_spec; print(*(x for x in {NOT_IN_THE_CORE} if find_spec(x)))"
    done = subprocess.run([str(python), "-c", code], check=True, capture_output=True, text=True)
    return [f"the core brings {name}" for name in done.stdout.split()]


def _problems(trial: Trial, program: Sequence[str], work: Path) -> list[str]:
    command = [*program, *trial.arguments.split()]
    done = subprocess.run(
        command, check=False, capture_output=True, text=True, cwd=work, env=_environment(), timeout=60
    )
    output = done.stdout + done.stderr
    if done.returncode == trial.code and trial.expected in output and "Traceback" not in output:
        return []
    return [f"{' '.join(command)}: exit code {done.returncode}, expected {trial.code}; {output}"]


def main() -> None:
    """Try the wheel that the command line names, and print what is wrong."""
    if len(sys.argv) != 2:
        sys.exit("usage: python scripts/try_wheel.py WHEEL")
    problems = try_wheel(Path(sys.argv[1]).absolute())
    print(
        "\n".join(problems)
        or f"{len(TRIALS)} commands of the core did what is expected, and one by uv tool run"
    )
    sys.exit(bool(problems))


if __name__ == "__main__":
    main()
