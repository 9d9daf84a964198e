"""A process that stores and fetches chunks in a directory which it shares with others."""

from __future__ import annotations

import json
import os
import random
import time
from collections import Counter
from pathlib import Path

from kvferry.tiers.files import chunk_file as direct_io
from kvferry.tiers.names import GetOutcome, PutOutcome
from support.chunk_files import key
from support.stores import fetch, keep, open_store

NUMBERS = 60
"""Chunks that the processes store and fetch, more than the directory has room for."""


def work(path: Path, seed: int | str, report: Path | str, fetching: bool = True, least: int = 0) -> None:
    """Store and fetch until killed or told to stop, but `least` hits and stores; report what became of it.

    The report counts what others stored: chunks fetched (``foreign``), and the most that the index had at a
    time (``listed``).
    """
    report = Path(report)
    draw = random.Random(int(seed))
    store = open_store(path, lock_seconds=25)
    write = os.pwritev

    def in_steps(fd, pieces, at):
        # Slow enough to be caught in the middle.
        time.sleep(draw.random() * 0.002)
        return write(fd, pieces[:1], at)

    direct_io.os.pwritev = in_steps
    report.with_suffix(".begun").touch()
    wrong, foreign, listed, own = 0, 0, 0, set()
    puts, gets = Counter[PutOutcome](), Counter[GetOutcome]()
    while (
        not report.with_suffix(".stop").exists()
        or puts[PutOutcome.STORED] < least
        or (fetching and gets[GetOutcome.HIT] < least)
    ):
        number = draw.randrange(NUMBERS)
        if number % 10 == 0:
            store.refresh()
            others = [key(other) for other in range(NUMBERS) if other not in own]
            listed = max(listed, int(store.contains(others).sum()))
            store.mark_used([key(number)])
        if fetching and draw.random() < 0.5:
            done, right = fetch(store, number)
            gets[done] += 1
            wrong += done is GetOutcome.HIT and not right
            foreign += done is GetOutcome.HIT and number not in own
        else:
            puts[done := keep(store, number)] += 1
            if done is PutOutcome.STORED:
                own.add(number)
    told = {"puts": puts, "gets": gets, "wrong": wrong, "foreign": foreign, "listed": listed}
    report.write_text(json.dumps(told))
