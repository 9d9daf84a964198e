"""A file of questions in the format of GSM8K, and the task of lm-eval that asks them."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path

from kvferry.common.errors import ConfigError

GSM8K = "gsm8k"
"""Name of lm-eval's own task."""
EXAMPLES = 5
"""Number of solved questions at the start of each prompt, as in lm-eval's own task."""
_OWN = "kvferry_questions"
_ANSWER = re.compile(r"#### -?[0-9.,]+")


def read_questions(path: Path) -> Sequence[str]:
    """Check a file of questions, and return its answers.

    Each line is a JSON object with the strings ``question`` and ``answer``. The answer contains ``####`` and
    the final number, as in GSM8K.

    Args:
        path: path of the file.

    Raises:
        ConfigError: the file cannot be read, a line has another form, or there are too few questions to put
            other ones before each of them.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise ConfigError(
            f"--questions {path} cannot be read: {reason}; name a file of JSON lines"
        ) from error
    for number, line in enumerate(lines, 1):
        if not _is_question(line):
            raise ConfigError(
                f'--questions {path}, line {number}: write one JSON object per line, as {{"question": "...", '
                '"answer": "... #### 42"}'
            )
    if len(lines) <= EXAMPLES:
        raise ConfigError(
            f"--questions {path} has {len(lines)} questions; give at least {EXAMPLES + 1}, because "
            f"{EXAMPLES} others are the examples before each question"
        )
    return [json.loads(line)["answer"] for line in lines]


def _is_question(line: str) -> bool:
    try:
        found = json.loads(line)
    except (json.JSONDecodeError, RecursionError):
        return False
    if not isinstance(found, dict):
        return False
    question, answer = found.get("question"), found.get("answer")
    return isinstance(question, str) and isinstance(answer, str) and bool(_ANSWER.search(answer))


def write_task(path: Path, gsm8k: Path, folder: Path, *, examples: int = EXAMPLES) -> str:
    """Write the task that asks the questions of a file, and return the task's name.

    The task takes prompts, stop texts and scoring from lm-eval's own GSM8K. The examples before a question
    are other questions of the file.

    Args:
        path: file of questions.
        gsm8k: file of lm-eval's own task.
        folder: folder for the task's file.
        examples: number of solved questions at the start of each prompt.
    """
    task = {
        "include": str(gsm8k),
        "task": _OWN,
        "tag": None,
        "dataset_path": "json",
        "dataset_name": None,
        "dataset_kwargs": {"data_files": {"test": str(path.resolve())}},
        "training_split": None,
        "fewshot_split": "test",
        "test_split": "test",
        "num_fewshot": examples,
    }
    # JSON is YAML.
    (folder / f"{_OWN}.yaml").write_text(json.dumps(task, indent=2), encoding="utf-8")
    return _OWN
