"""A conversation through two engines: who is asked what, and what is said of what was read."""

from __future__ import annotations

import io

from rich.console import Console

from benchmarks.turns import report
from benchmarks.turns.engine import TurnAnswer
from benchmarks.turns.measure import Conversation, FamilyTurns, TurnLoad, lead
from kvferry.tools.serving.router.bodies import ASK_FOR_KV

LENGTHS = Conversation(turns=3, first=50, question=10, answer=4)


class Asked:
    """An engine that notes what it is asked."""

    def __init__(self, *answers: TurnAnswer) -> None:
        self.answers, self.asked = list(answers), []

    def call(self, method, prompt, tokens, params=None) -> TurnAnswer:
        assert method == "ask"
        self.asked.append((list(prompt), tokens, params))
        return self.answers.pop(0)


def test_each_turn_goes_through_both_engines_and_begins_with_the_whole_conversation() -> None:
    offers = [{"ticket": n} for n in range(3)]
    prefill = Asked(*(TurnAnswer((0,), offer) for offer in offers))
    ends = [49, 63, 77]
    decode = Asked(
        *(TurnAnswer((n, n, n, n), None, end - 10, end, {"0 state": 5}) for n, end in enumerate(ends))
    )
    loads = lead(LENGTHS, prefill, decode)
    prompts = [prompt for prompt, _, _ in decode.asked]
    assert [prompt for prompt, _, _ in prefill.asked] == prompts
    assert [len(prompt) for prompt in prompts] == [50, 64, 78]
    assert LENGTHS.longest == 82
    assert prompts[1][:54] == prompts[0] + [0] * 4
    assert [(tokens, params) for _, tokens, params in prefill.asked] == [(1, ASK_FOR_KV)] * 3
    assert [(tokens, params) for _, tokens, params in decode.asked] == [(4, offer) for offer in offers]
    assert [(load.prompt, load.known, load.end) for load in loads] == [
        (50, 0, 49),
        (64, 53, 63),
        (78, 67, 77),
    ]


def _load(known: int, begin: int, attention: int, state: int = 100) -> TurnLoad:
    return TurnLoad(known + 11, known, begin, known + 10, {"0 state": state, "1 full_attention": attention})


def test_a_turn_may_read_less_than_a_block_again() -> None:
    first = _load(0, 0, 4000)
    without = (first, _load(200, 0, 9000))
    good = FamilyTurns("lfm2", 128, without, (first, _load(200, 128, 2000)))
    assert (report.most_again(good), report.is_reached(good)) == (72, True)
    assert not report.is_reached(FamilyTurns("lfm2", 128, without, (first, _load(200, 72, 2000))))
    two_states = FamilyTurns("lfm2", 128, without, (first, _load(200, 128, 2000, state=200)))
    assert not report.is_reached(two_states)
    (value,) = report.as_json([good])
    assert (value["most_again"], value["reached"], len(value["shared"])) == (72, True, 2)


def test_report_of_turns_fits_a_terminal() -> None:
    first = _load(0, 0, 4 << 20)
    found = FamilyTurns(
        "qwen3next", 256, (first, _load(90_000, 0, 900 << 20)), (first, _load(90_000, 89_984, 1 << 20))
    )
    console = Console(file=io.StringIO(), width=80)
    report.show([found], console)
    said = console.file.getvalue()
    assert max(map(len, said.splitlines())) <= 80
    assert "turns 2 to 2: 900 MiB without, 1.00 MiB with, 0.00 of it" in said
    assert "at most 16 tokens are read again, less than a block: reached" in said
