"""The result of one run of lm-eval: scores with their standard errors, and the text of every answer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.accuracy.harness import HarnessError

_METRIC = "exact_match"


@dataclass(frozen=True, slots=True)
class Score:
    """The share of right answers, by one way to find the final number in an answer.

    Attributes:
        value: share of right answers, 0 to 1.
        error: standard error of the share; 0 if lm-eval gives none, as for a single question.
    """

    value: float
    error: float


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to one question.

    Attributes:
        prompt: digest of the prompt.
        text: text of the answer.
    """

    prompt: str
    text: str


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The result of one run of lm-eval.

    Attributes:
        version: version of lm-eval.
        scores: scores by the name of lm-eval's filter, such as ``strict-match``.
        answers: answers by number of the question.
    """

    version: str
    scores: Mapping[str, Score]
    answers: Mapping[int, Answer]


class _Results(msgspec.Struct):
    results: dict[str, dict[str, Any]]
    lm_eval_version: str


class _Sample(msgspec.Struct):
    doc_id: int
    prompt_hash: str
    resps: list[list[str]]


def read_evaluation(folder: Path, task: str) -> Evaluation:
    """Read the files that lm-eval has written.

    Args:
        folder: folder of the results, with exactly one run.
        task: name of lm-eval's task.

    Raises:
        HarnessError: a file is missing, or has another format.
    """
    results, samples = _one(folder, "results_*.json"), _one(folder, f"samples_{task}_*.jsonl")
    try:
        found = msgspec.json.decode(results.read_bytes(), type=_Results)
        scores = dict(_scores(found.results[task]))
        # A question has one line per filter, with the same answer.
        lines = [msgspec.json.decode(line, type=_Sample) for line in samples.read_bytes().splitlines()]
        answers = {one.doc_id: Answer(one.prompt_hash, one.resps[0][0]) for one in lines}
    except (msgspec.DecodeError, LookupError, TypeError, ValueError) as error:
        raise HarnessError(
            f"lm-eval's results in {folder} are not in the expected format ({error}); install the version in "
            "requirements/accuracy.lock"
        ) from error
    if not scores or not answers:
        raise HarnessError(f"lm-eval's results in {folder} have no {_METRIC}, or no answers")
    return Evaluation(found.lm_eval_version, scores, answers)


def _one(folder: Path, pattern: str) -> Path:
    found = list(folder.rglob(pattern))
    if len(found) != 1:
        raise HarnessError(f"lm-eval wrote {len(found)} files {pattern} in {folder}; expected 1")
    return found[0]


def _scores(figures: Mapping[str, Any]) -> Iterator[tuple[str, Score]]:
    for key, value in figures.items():
        metric, _, name = key.partition(",")
        if metric == _METRIC:
            error = figures[f"{_METRIC}_stderr,{name}"]
            # lm-eval writes "N/A" if it cannot estimate the error.
            yield name, Score(float(value), 0.0 if isinstance(error, str) else float(error))
