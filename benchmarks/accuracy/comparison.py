"""Two evaluations of the same questions, and the verdict on them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain

from benchmarks.accuracy.evaluation import Evaluation
from benchmarks.accuracy.harness import HarnessError
from benchmarks.accuracy.moved import MovedKv
from benchmarks.accuracy.ways import Way

_ROUNDING = 1e-9
_MOST_LEFT = 0.5
"""Largest share of the single engine's score that spoiled KV may leave."""

RULE = (
    "Scores agree if they differ by at most the standard error of the difference: the root of the sum of "
    "both squared standard errors."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """The result of one way to move KV beside that of a single engine.

    Attributes:
        way: way to move KV.
        found, single: results with KV that moved, and of the single engine.
        moved: KV that was loaded.
        least_same: share of answers that must have the same text, 0 to 1.
    """

    way: Way
    found: Evaluation
    single: Evaluation
    moved: MovedKv
    least_same: float

    @property
    def count(self) -> int:
        """Number of questions."""
        return len(self.found.answers)

    @property
    def different(self) -> tuple[int, ...]:
        """Numbers of the questions whose two answers have different texts."""
        single = self.single.answers
        return tuple(n for n, one in sorted(self.found.answers.items()) if one.text != single[n].text)

    @property
    def same(self) -> int:
        """Number of questions whose two answers have the same text."""
        return self.count - len(self.different)

    def difference(self, name: str) -> float:
        """Return the score less the single engine's, by the name of lm-eval's filter."""
        return self.found.scores[name].value - self.single.scores[name].value

    def allowed(self, name: str) -> float:
        """Return the standard error of the difference of both scores, by the name of lm-eval's filter."""
        return math.hypot(self.found.scores[name].error, self.single.scores[name].error)

    @property
    def failures(self) -> tuple[str, ...]:
        """Sentences about all that fails. Empty if the comparison succeeds.

        A comparison succeeds if all scores agree and enough answers are the same text. With spoiled KV it
        succeeds if an answer differs, and at most half of the single engine's right answers are left.
        """
        found = self._spoiled_failures() if self.way.spoils else self._failures()
        return tuple(f"{self.way.title}: {sentence}" for sentence in found)

    def _failures(self) -> Iterator[str]:
        for name in self.found.scores:
            if abs(self.difference(name)) > self.allowed(name) + _ROUNDING:
                yield (
                    f"the scores by {name} differ by {self.difference(name):+.4f}, "
                    f"allowed is {self.allowed(name):.4f}."
                )
        if self.same < self.least_same * self.count:
            yield (
                f"{self.same} of {self.count} answers are the same text, --min-same asks for "
                f"{self.least_same:g} of them."
            )

    def _spoiled_failures(self) -> Iterator[str]:
        if not self.different:
            yield "no answer changed, although the KV was spoiled: this comparison cannot detect wrong KV."
        for name, score in self.found.scores.items():
            if score.value > _MOST_LEFT * self.single.scores[name].value:
                yield (
                    f"the score by {name} is {score.value:.4f} with spoiled KV, so this comparison cannot "
                    "detect wrong KV."
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class Results:
    """The comparisons of all ways to move KV with the same single engine.

    Attributes:
        model: path or id of the model.
        questions: name of the file of questions, or GSM8K.
        examples: number of solved questions at the start of each prompt.
        single: result of the single engine.
        comparisons: at least one comparison.
    """

    model: str
    questions: str
    examples: int
    single: Evaluation
    comparisons: tuple[Comparison, ...]

    @property
    def failures(self) -> tuple[str, ...]:
        """Sentences about all that fails. Empty if all comparisons succeed."""
        return tuple(chain.from_iterable(one.failures for one in self.comparisons))


def check_same_questions(found: Evaluation, single: Evaluation) -> None:
    """Check that both systems were asked the same prompts.

    Raises:
        HarnessError: they were not, or their scores have different names.
    """
    prompts = [{n: answer.prompt for n, answer in one.answers.items()} for one in (found, single)]
    if prompts[0] != prompts[1] or found.scores.keys() != single.scores.keys():
        raise HarnessError(
            "lm-eval asked the two systems different questions; do not change the questions during a run"
        )
