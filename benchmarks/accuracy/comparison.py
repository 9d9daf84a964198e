"""Two evaluations of the same questions, and the verdict on them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from benchmarks.accuracy.evaluation import Evaluation
from benchmarks.accuracy.harness import HarnessError
from benchmarks.accuracy.moved import MovedKv

_ROUNDING = 1e-9

RULE = (
    "Scores agree if they differ by at most the standard error of the difference: the root of the sum of "
    "both squared standard errors."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """The result of a prefill/decode pair beside that of a single engine.

    Attributes:
        model: path or id of the model.
        questions: name of the file of questions, or GSM8K.
        pair, single: results of the two systems.
        moved: KV that the decode engine read.
        spoiled: True if the decode engine zeroed what it had read (negative control).
        least_same: share of answers that must have the same text, 0 to 1.
    """

    model: str
    questions: str
    pair: Evaluation
    single: Evaluation
    moved: MovedKv
    spoiled: bool
    least_same: float

    @property
    def count(self) -> int:
        """Number of questions."""
        return len(self.pair.answers)

    @property
    def different(self) -> tuple[int, ...]:
        """Numbers of the questions whose two answers have different texts."""
        single = self.single.answers
        return tuple(n for n, one in sorted(self.pair.answers.items()) if one.text != single[n].text)

    @property
    def same(self) -> int:
        """Number of questions whose two answers have the same text."""
        return self.count - len(self.different)

    def difference(self, name: str) -> float:
        """Return the pair's score less the single engine's, by the name of lm-eval's filter."""
        return self.pair.scores[name].value - self.single.scores[name].value

    def allowed(self, name: str) -> float:
        """Return the standard error of the difference of both scores, by the name of lm-eval's filter."""
        return math.hypot(self.pair.scores[name].error, self.single.scores[name].error)

    @property
    def failures(self) -> tuple[str, ...]:
        """Sentences about all that fails. Empty if the comparison succeeds.

        A comparison succeeds if all scores agree and enough answers are the same text. With spoiled KV it
        succeeds if an answer differs.
        """
        return tuple(self._spoiled_failures() if self.spoiled else self._failures())

    def _failures(self) -> Iterator[str]:
        for name in self.pair.scores:
            if abs(self.difference(name)) > self.allowed(name) + _ROUNDING:
                yield (
                    f"The scores by {name} differ by {self.difference(name):+.4f}, "
                    f"allowed is {self.allowed(name):.4f}."
                )
        if self.same < self.least_same * self.count:
            yield (
                f"{self.same} of {self.count} answers are the same text, --min-same asks for "
                f"{self.least_same:g} of them."
            )

    def _spoiled_failures(self) -> Iterator[str]:
        if not self.different:
            yield "No answer changed, although the KV was spoiled: this comparison cannot detect wrong KV."


def check_same_questions(pair: Evaluation, single: Evaluation) -> None:
    """Check that both systems were asked the same prompts.

    Raises:
        HarnessError: they were not, or their scores have different names.
    """
    prompts = [{n: answer.prompt for n, answer in one.answers.items()} for one in (pair, single)]
    if prompts[0] != prompts[1] or pair.scores.keys() != single.scores.keys():
        raise HarnessError(
            "lm-eval asked the two systems different questions; do not change the questions during a run"
        )
