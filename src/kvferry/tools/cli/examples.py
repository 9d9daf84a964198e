"""Examples at the end of the help of commands."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

_EXAMPLES: Mapping[str, Sequence[str]] = {
    "kvferry": (
        "kvferry plan gemma-3-27b-it --to-tp 2",
        "kvferry serve Qwen/Qwen3-0.6B -- --max-model-len 8192",
        "kvferry doctor http://127.0.0.1:8000",
    ),
    "plan": (
        "kvferry plan gemma-3-27b-it --to-tp 2 --tokens 32768",
        "kvferry plan ./model/config.json --block-size 16 --to-block-size 64",
        "kvferry plan Llama-3.1-8B --to-tp 2 --html picture.html",
        "kvferry plan --list",
    ),
    "replay": (
        "kvferry replay trace.jsonl --model Llama-3.1-8B --tier host=64GiB",
        "kvferry replay trace.jsonl --model gpt-oss-20b --engines 4 --route session",
        "kvferry replay trace.jsonl --model Llama-3.1-8B --curve --html curve.html",
        "kvferry replay trace.jsonl --model Llama-3.1-8B --target-hit 0.3",
        "kvferry replay users=2000,turns=8 --model gpt-oss-120b --target-hit 0.5",
    ),
    "serve": (
        "kvferry serve Qwen/Qwen3-0.6B --port 8000",
        "kvferry serve ./model --prefill 2 --decode-tp 2 -- --max-model-len 8192",
        "curl http://127.0.0.1:8000/v1/models",
    ),
    "doctor": (
        "kvferry doctor",
        "kvferry doctor http://127.0.0.1:8000",
        "kvferry doctor --config kv.json --no-machine",
        "kvferry doctor --calibrate",
    ),
    "demo": (
        "kvferry demo",
        "kvferry demo --families gemma3 --prompts 8",
        "kvferry demo Qwen/Qwen3-0.6B -- --max-model-len 4096",
    ),
    "config": (
        'vllm serve MODEL --kv-transfer-config "$(kvferry config --role decode)"',
        "kvferry config --tiers default",
    ),
    "init": ("kvferry init", "kvferry serve Qwen/Qwen3-0.6B --settings kvferry.toml"),
    "router": ("kvferry router --prefill http://first:8100 --decode http://second:8200",),
    "keygen": ("kvferry keygen secret.txt",),
    "top": (
        "kvferry top http://127.0.0.1:8000",
        "kvferry top --json http://10.0.0.1:8100 http://10.0.0.2:8200",
        "kvferry top --dashboard .",
    ),
    "explain": ("kvferry explain", "kvferry explain cmpl-4f1c"),
}


def examples(command: str) -> str:
    r"""Return the examples of a command, as the end of its help.

    The text begins with a backspace character, so that its lines are not joined.

    Args:
        command: name of the command; ``kvferry`` for the whole program.

    >>> examples("keygen")
    '\x08\nExamples:\n  kvferry keygen secret.txt'
    """
    return "\n".join(("\b", "Examples:", *(f"  {line}" for line in _EXAMPLES[command])))
