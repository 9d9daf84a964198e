"""The campaign: a plan of faults against running engines, the judgement, and what is left.

python -m faults.campaign --faults 500 --seed 1 --report docs/reliability.md
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from faults import clients, crashes, network, storage, transfer  # noqa: F401 - declare kinds
from faults.kinds import KINDS
from faults.mutants import MUTANTS
from faults.plan import plan, rounds
from faults.report import campaign_part, write
from faults.served import Stuck
from faults.stage import FAMILIES, Family, References, Stage
from faults.values import Fault, Leaks, Totals, Trial, Verdict, judged, totals
from support.vllm_engine.process import EngineError

TRIAL_SECONDS = 150.0
"""When a trial that hangs as a whole is given up, and counts as stuck."""
TRIES_OF_A_MUTANT = 4


@dataclass
class Outcome:
    """What a campaign has found so far.

    Attributes:
        verdicts: of all faults.
        leaks: of all pairs of engines.
        caught: by protection, what the campaign found without it; empty if it found nothing.
        seconds: it took.
    """

    verdicts: list[Verdict] = field(default_factory=list)
    leaks: Leaks = field(default_factory=Leaks)
    caught: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def totals(self) -> Totals:
        return totals(self.verdicts, self.leaks)


async def try_fault(stage: Stage, fault: Fault) -> Verdict:
    """Inject a fault and judge what becomes of it; whatever a trial raises counts against kvferry."""
    trial = Trial()
    try:
        trial = await asyncio.wait_for(KINDS[fault.kind].trial(stage, fault), TRIAL_SECONDS)
    except TimeoutError:
        trial.stuck.append(f"the trial did not end within {TRIAL_SECONDS:g} s")
    except (EngineError, Stuck) as error:
        trial.stuck.append(str(error))
    except Exception:  # noqa: BLE001 - a trial that breaks shows nothing, and is not passed over
        trial.stuck.append(traceback.format_exc())
    return judged(fault, trial)


async def against(stage: Stage, faults: Sequence[Fault]) -> list[Verdict]:
    """Inject faults into a pair that runs, round by round."""
    verdicts: list[Verdict] = []
    for number, one in enumerate(rounds(faults, KINDS)):
        await stage.make_ready()
        found = await asyncio.gather(*(try_fault(stage, fault) for fault in one))
        verdicts += found
        for verdict in found:
            _say(verdict)
        if number % 8 == 7:
            await stage.rest()
    return verdicts


def _say(verdict: Verdict) -> None:
    good = verdict.injected and verdict.detected and verdict.recovered
    mark = "ok " if good else "BAD"
    note = verdict.note if len(verdict.note) < 300 or not good else f"{verdict.note[:300]} …"
    print(f"{mark} {verdict.fault.family} {verdict.fault.number} {verdict.fault.kind}: {note}", flush=True)


async def without(stage: Stage, protection: str) -> str:
    """What the campaign finds if a protection is switched off; empty if it finds nothing."""
    kinds = [name for name, kind in KINDS.items() if protection in kind.protections]
    engines = (stage.prefill, stage.decode)
    for engine in engines:
        await engine.do("switch_off", protection)
    try:
        for seed in range(TRIES_OF_A_MUTANT):
            for name in kinds:
                await stage.make_ready()
                verdict = await try_fault(stage, Fault(seed, name, stage.family.name, 31 * seed + 7))
                if verdict.injected and (verdict.wrong or verdict.stuck or not verdict.detected):
                    return f"{name}: {verdict.note or 'not detected'}"
    finally:
        for engine in engines:
            await engine.do("switch_on")
            await engine.do("reset_all")
        await stage.rest()
        for engine in engines:
            await engine.do("forget_prefixes")
    return ""


async def with_family(
    family: Family, faults: Sequence[Fault], folder: Path, outcome: Outcome, protections: Sequence[str]
) -> None:
    """Start a family's engines, inject its faults, switch protections off, and look at what is left."""
    await asyncio.to_thread(folder.mkdir, parents=True)
    references = await asyncio.to_thread(
        References, family, folder.parent / "checkpoints", folder / "single.log"
    )
    stage = Stage(family, references, folder)
    await stage.start()
    try:
        outcome.verdicts += await against(stage, faults)
        for protection in protections:
            outcome.caught[protection] = await without(stage, protection)
            print(f"without {protection}: {outcome.caught[protection] or 'NOTHING WAS FOUND'}", flush=True)
    finally:
        left = await stage.stop()
        outcome.leaks += left
        print(f"{family.name}: left {left}", flush=True)


async def campaign(
    seed: int, count: int, names: Sequence[str], folder: Path, *, mutants: bool, only: Sequence[str] = ()
) -> Outcome:
    """Run a whole campaign.

    Args:
        seed: of the plan.
        count: of faults.
        names: of families.
        folder: for logs, checkpoints and chunks.
        mutants: switch protections off in turn as well, on the first family.
        only: names of kinds; all if empty.
    """
    began, outcome = time.monotonic(), Outcome()
    kinds = {name: kind for name, kind in KINDS.items() if not only or name in only}
    faults = plan(seed, count, names, kinds)
    for number, name in enumerate(names):
        mine = [fault for fault in faults if fault.family == name]
        protections = list(MUTANTS) if mutants and number == 0 else []
        await with_family(FAMILIES[name], mine, folder / name, outcome, protections)
    outcome.seconds = time.monotonic() - began
    return outcome


def main() -> int:
    """Run a campaign from the command line; 1 if anything is not as it must be."""
    parser = argparse.ArgumentParser(prog="python -m faults.campaign", description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--faults", type=int, default=500)
    parser.add_argument("--families", nargs="+", default=list(FAMILIES), choices=list(FAMILIES))
    parser.add_argument("--kinds", nargs="*", default=[], choices=list(KINDS))
    parser.add_argument("--no-mutants", action="store_true")
    parser.add_argument("--folder", type=Path, help="for logs, checkpoints and chunks; by default not kept")
    parser.add_argument("--report", type=Path, help="the page whose part is written")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="kvferry-", dir="/tmp") as runtime:
        os.environ["XDG_RUNTIME_DIR"] = runtime
        folder = given.folder or Path(runtime) / "campaign"
        outcome = asyncio.run(
            campaign(
                given.seed,
                given.faults,
                given.families,
                folder,
                mutants=not given.no_mutants,
                only=given.kinds,
            )
        )
    found = outcome.totals
    print(
        f"{found.faults} faults in {outcome.seconds:.0f} s: {found.injected} injected, "
        f"{found.detected} detected, {found.recovered} recovered; {found.zeros}"
    )
    if given.report is not None:
        command = f"make faults SEED={given.seed} FAULTS={given.faults}"
        write(
            given.report,
            "faults",
            campaign_part(
                command, given.families, KINDS, outcome.verdicts, found, outcome.caught, outcome.seconds
            ),
        )
    missed = [name for name, caught in outcome.caught.items() if not caught]
    for problem in [
        *found.problems,
        *(f"without {name} nothing was found" for name in missed),
        *found.leaks.notes,
    ]:
        print(f"BAD {problem}", file=sys.stderr)
    return int(bool(found.problems or missed))


if __name__ == "__main__":
    sys.exit(main())
