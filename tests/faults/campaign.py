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
from dataclasses import dataclass, field, replace
from pathlib import Path

from faults import (  # noqa: F401 - declare kinds
    clients,
    crashes,
    fleet,
    gathered,
    network,
    storage,
    threads,
    transfer,
)
from faults.kinds import KINDS
from faults.mutants import MUTANTS
from faults.plan import plan, possible, rounds
from faults.references import FAMILIES, Family, References
from faults.report import campaign_part, page_with, write
from faults.served import Stuck
from faults.stage import Stage
from faults.values import Fault, Leaks, Totals, Trial, Verdict, judged, totals
from support.long.record import short
from support.long.run import commit
from support.vllm_engine.process import EngineError

TRIAL_SECONDS = 150.0
"""When a trial that hangs as a whole is given up, and counts as stuck."""
TRIES = 3
TRIES_OF_A_MUTANT = 4
IN_EVERY_FAMILY = ("lease words", "checksum")
"""Protections that are switched off in every family: they show that its tolerance tells right from wrong."""


@dataclass
class Outcome:
    """What a campaign has found so far.

    Attributes:
        verdicts: of all faults.
        leaks: of all pairs of engines.
        caught: by protection and family, what the campaign found without it; empty if it found nothing.
        tolerances: of logprobs, by family.
        seconds: it took.
    """

    verdicts: list[Verdict] = field(default_factory=list)
    leaks: Leaks = field(default_factory=Leaks)
    caught: dict[tuple[str, str], str] = field(default_factory=dict)
    tolerances: dict[str, float] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def totals(self) -> Totals:
        return totals(self.verdicts, self.leaks)


async def try_fault(stage: Stage, fault: Fault) -> Verdict:
    """Inject a fault and judge what becomes of it.

    A trial that shows nothing, for example because a deadline passed before the fault took effect on a slow
    machine, is repeated. A trial in which something went wrong is not.
    """
    for seed in range(fault.seed, fault.seed + TRIES):
        verdict = await _try_once(stage, replace(fault, seed=seed))
        if verdict.bad or (verdict.injected and verdict.detected):
            break
    return replace(verdict, fault=fault)


async def _try_once(stage: Stage, fault: Fault) -> Verdict:
    """Inject a fault once; whatever a trial raises counts against kvferry."""
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
    """What the campaign finds on both engines without a protection; empty if not every kind finds it.

    A wrong answer counts, an engine that dies, and what the protection forbids. That nothing was detected
    does not.
    """
    of_family = possible(KINDS, [stage.family.name])
    found = []
    for name in (name for name, kind in of_family.items() if protection in kind.protections):
        for seed in range(TRIES_OF_A_MUTANT):
            verdict = await _without(stage, protection, Fault(seed, name, stage.family.name, 31 * seed + 7))
            if verdict.injected and (verdict.wrong or verdict.forbidden):
                found.append(f"{name}: {verdict.note}")
                break
            print(
                f"{stage.family.name} without {protection}: {name} found nothing: {verdict.note}", flush=True
            )
        else:
            return ""
    return "; ".join(found)


async def _without(stage: Stage, protection: str, fault: Fault) -> Verdict:
    """Inject a fault into engines without a protection."""
    await stage.make_ready()
    for engine in (stage.prefill, stage.decode):
        await engine.do("switch_off", protection)
    verdict = await try_fault(stage, fault)
    if deaths := await stage.replace_dead(counts=False):
        verdict = replace(verdict, injected=True, forbidden=len(deaths), note=_last_line(deaths[0]))
    engines = stage.prefill, stage.decode  # a trial may have put others in their place
    for engine in engines:
        await engine.do("switch_on")
        await engine.do("reset_all")
    await stage.rest()
    for engine in engines:
        await engine.do("forget_prefixes")
    return verdict


def _last_line(death: str) -> str:
    return f"an engine died: {death.partition('; see ')[0].strip().splitlines()[-1]}"


async def with_family(
    family: Family, faults: Sequence[Fault], folder: Path, outcome: Outcome, protections: Sequence[str]
) -> None:
    """Start a family's engines, inject its faults, switch protections off, and look at what is left."""
    await asyncio.to_thread(folder.mkdir, parents=True)
    references = await asyncio.to_thread(References, family, folder.parent / "checkpoints", folder)
    outcome.tolerances[family.name] = references.tolerance
    print(f"{family.name}: answers within {references.tolerance:.3g} are right", flush=True)
    stage = Stage(family, references, folder)
    await stage.start()
    try:
        outcome.verdicts += await against(stage, faults)
        for protection in protections:
            found = outcome.caught[protection, family.name] = await without(stage, protection)
            print(f"{family.name} without {protection}: {found or 'NOTHING WAS FOUND'}", flush=True)
    finally:
        left = await stage.stop()
        outcome.leaks += left
        print(f"{family.name}: left {left}", flush=True)


def drawn(seed: int, count: int, names: Sequence[str], only: Sequence[str] = ()) -> tuple[Fault, ...]:
    """Draw a campaign's plan.

    Args:
        seed: of the plan.
        count: of faults.
        names: of families.
        only: names of kinds; all if empty.

    Raises:
        ValueError: fewer faults than kinds, or no engine of these families can meet any of the kinds.
    """
    kinds = {name: kind for name, kind in possible(KINDS, names).items() if not only or name in only}
    if not kinds:
        raise ValueError(f"{', '.join(only)}: engines of {', '.join(names)} cannot meet these kinds")
    return plan(seed, count, names, kinds)


async def campaign(
    faults: Sequence[Fault], names: Sequence[str], folder: Path, protections: Sequence[str]
) -> Outcome:
    """Run a whole campaign.

    Args:
        faults: the plan.
        names: of families.
        folder: for logs, checkpoints and chunks.
        protections: those of `MUTANTS` to switch off in turn when the faults have been injected.
    """
    began, outcome = time.monotonic(), Outcome()
    for name in names:
        mine = [fault for fault in faults if fault.family == name]
        off = switched_off(name, protections, [one for one, _ in outcome.caught])
        await with_family(FAMILIES[name], mine, folder / name, outcome, off)
    outcome.seconds = time.monotonic() - began
    return outcome


def switched_off(family: str, protections: Sequence[str], before: Sequence[str]) -> list[str]:
    """Return the protections to switch off on a family's engines: those that were not before, some always."""
    caught_by = {protection for kind in possible(KINDS, [family]).values() for protection in kind.protections}
    return [one for one in protections if one in caught_by and (one not in before or one in IN_EVERY_FAMILY)]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a campaign from the command line; 1 if anything is not as it must be."""
    parser = argparse.ArgumentParser(prog="python -m faults.campaign", description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--faults", type=int, default=500)
    parser.add_argument("--families", nargs="+", default=list(FAMILIES), choices=list(FAMILIES))
    parser.add_argument("--kinds", nargs="*", default=[], choices=list(KINDS))
    parser.add_argument("--no-mutants", action="store_true")
    parser.add_argument("--folder", type=Path, help="for logs, checkpoints and chunks; by default not kept")
    parser.add_argument("--report", type=page_with("faults"), help="the page whose part is written")
    given = parser.parse_args(arguments)
    try:
        faults = drawn(given.seed, given.faults, given.families, given.kinds)
    except ValueError as error:
        parser.error(str(error))
    try:
        with tempfile.TemporaryDirectory(prefix="kvferry-", dir="/tmp") as runtime:
            os.environ["XDG_RUNTIME_DIR"] = runtime
            folder = given.folder or Path(runtime) / "campaign"
            outcome = asyncio.run(
                campaign(faults, given.families, folder, () if given.no_mutants else [*MUTANTS])
            )
    except KeyboardInterrupt:
        print(
            "the campaign was stopped: its engines have ended, and no figures were written", file=sys.stderr
        )
        return 130
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
                command,
                short(commit()),
                outcome.tolerances,
                KINDS,
                outcome.verdicts,
                found,
                outcome.caught,
                outcome.seconds,
            ),
        )
    missed = [f"{name} ({family})" for (name, family), caught in outcome.caught.items() if not caught]
    for problem in [
        *found.problems,
        *(f"without {name} nothing was found" for name in missed),
        *found.leaks.notes,
    ]:
        print(f"BAD {problem}", file=sys.stderr)
    return int(bool(found.problems or missed))


if __name__ == "__main__":
    sys.exit(main())
