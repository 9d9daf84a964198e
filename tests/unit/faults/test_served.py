"""An engine that dies is seen to, a request that does not end is stuck, and a wrong answer is wrong."""

from __future__ import annotations

import asyncio
import multiprocessing as mp
from pathlib import Path
from typing import Any

import pytest

from faults.references import TOLERANCE, References
from faults.served import Served, Stuck
from support.vllm_engine.process import EngineError


def made(log: Path) -> tuple[Served, Any]:
    """One without a process, and the engine's end of its pipe."""
    one = object.__new__(Served)
    one.log = log
    one._pipe, theirs = mp.Pipe()
    one.listen()
    return one, theirs


@pytest.mark.parametrize("how", ["says so", "is gone"])
def test_engine_that_dies_fails_its_waiting_calls(tmp_path, how):
    async def die() -> Served:
        one, theirs = made(tmp_path / "log")
        waiting = asyncio.create_task(one.do("free_blocks"))
        await asyncio.sleep(0)
        if how == "says so":
            theirs.send(("died", 0, "Traceback"))
        else:
            theirs.close()
        with pytest.raises(EngineError):
            await waiting
        return one

    assert str(tmp_path / "log") in asyncio.run(die()).died


def test_an_engine_that_the_campaign_ends_has_not_died(tmp_path):
    async def end() -> Served:
        one, theirs = made(tmp_path / "log")
        one.deafen()
        theirs.close()
        await asyncio.sleep(0.01)
        return one

    assert not asyncio.run(end()).died


def test_a_request_without_an_answer_is_stuck(tmp_path):
    async def wait() -> None:
        one, _ = made(tmp_path / "log")
        await one.answer("r1", asyncio.get_running_loop().create_future(), 0.05)

    with pytest.raises(Stuck, match="request r1 has not ended"):
        asyncio.run(wait())


def test_each_of_two_requests_with_one_name_has_its_answer(tmp_path):
    async def ask_twice() -> list[Any]:
        one, theirs = made(tmp_path / "log")
        one.adapter_of = lambda _: ""
        asking = [asyncio.create_task(one.ask("r1", [token], None, 6, "")) for token in (1, 2, 3)]
        await asyncio.sleep(0)
        for reply in (("value", 0, None), ("error", 1, "refused"), ("value", 2, None)):
            theirs.send(reply)
        first, refused, last = await asyncio.gather(*asking, return_exceptions=True)
        assert isinstance(refused, EngineError)
        for answer in ("one", "two", "nobody's"):
            theirs.send(("done", "r1", answer))
        return [await one.answer("r1", found) for found in (first, last)]

    assert asyncio.run(ask_twice()) == ["one", "two"]


ANSWER = {"tokens": [1, 2], "logprobs": [{1: -0.1, 3: -2.0}, {2: -0.2}], "finish": "length"}


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"tokens": [1, 4], "logprobs": [{1: -0.1}, {4: -0.1}]},
        {"logprobs": [{1: -0.11, 3: -2.0}, {2: -0.2}]},
        {"finish": "error"},
    ],
)
def test_answer_with_other_tokens_logprobs_or_finish_reason_is_wrong(change):
    references = object.__new__(References)
    references._answers, references._own = {((5, 6), ""): ANSWER}, {(5, 6): ""}
    references.tolerance = TOLERANCE
    assert bool(references.why_wrong([5, 6], ANSWER | change)) == bool(change)
