"""`kvferry cache`: what lies in a directory of the file tier, and keeping it in order."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from kvferry.errors import ConfigError

_BAD = 1

_Path = Annotated[Path, typer.Argument(help="The directory, as the tier's path.")]
_Json = Annotated[bool, typer.Option("--json", help="Print JSON, in bytes and seconds since 1970.")]


def register(app: typer.Typer) -> None:
    """Add the commands to `app`."""
    cache = typer.Typer(help="See to the files of a KV cache.", no_args_is_help=True)
    cache.command()(ls)
    cache.command()(stat)
    cache.command()(verify)
    cache.command()(gc)
    cache.command()(clear)
    app.add_typer(cache, name="cache")


def ls(path: _Path, as_json: _Json = False) -> None:
    """List the namespaces: whose KV is kept, how much, and when it was last used."""
    from kvferry.plan.units import size
    from kvferry.tiers.survey import a_cache, holdings

    found = holdings(a_cache(path))
    if as_json:
        print(json.dumps([asdict(one) for one in found]))
        return
    for one in found:
        print(f"{one.namespace[:16]}  {_shown(one.name) or 'no model named'}"[:80])
        for line in _lines(_said(one.facts)):
            print(f"  {line}")
        held = f"{one.chunks} chunks, {one.tokens} tokens, {size(one.total_bytes)}"
        if one.oldest is not None and one.newest is not None:
            held += f"; last used {_age(one.newest)} ago, the oldest {_age(one.oldest)} ago"
        print(f"  {held}")
        if one.unreadable:
            print(f"  {one.unreadable} of them cannot be read; see kvferry cache verify")
    if not found:
        print("No namespaces.")


def stat(path: _Path, as_json: _Json = False) -> None:
    """Say what the directory holds in all, and what it may."""
    from kvferry.plan.units import size
    from kvferry.tiers.survey import a_cache, totals

    found = totals(a_cache(path))
    if as_json:
        print(json.dumps(asdict(found)))
        return
    rows = [
        (
            "capacity",
            "unknown: the ledger is damaged" if found.capacity is None else size(found.capacity),
        ),
        ("in use", size(found.total_bytes)),
        ("free on disk", size(found.free)),
        ("chunks", f"{found.chunks} of {found.namespaces} namespaces, {size(found.chunk_bytes)}"),
        ("being written", f"{found.temporary}, {size(found.temporary_bytes)}"),
        ("quarantined", f"{found.quarantined}, {size(found.quarantined_bytes)}"),
    ]
    for name, value in rows:
        print(f"{name:<14} {value}")


def verify(
    path: _Path,
    quarantine: Annotated[bool, typer.Option("--quarantine", help="Move bad files to quarantine.")] = False,
    as_json: _Json = False,
) -> None:
    """Read every chunk and check every byte; exit code 1 if something is bad."""
    from kvferry.plan.units import size
    from kvferry.tiers.survey import a_cache, verify_all

    found = verify_all(a_cache(path), quarantine=quarantine)
    if as_json:
        print(json.dumps(asdict(found)))
    else:
        for one in found.bad:
            print(f"{one.path}\n  {one.why}{'; moved to quarantine' if one.moved else ''}")
        print(f"{found.chunks} chunks, {size(found.total_bytes)}: {len(found.bad)} bad")
    if found.bad:
        raise typer.Exit(_BAD)


def gc(
    path: _Path,
    capacity_gib: Annotated[
        float | None,
        typer.Option(min=0, help="Evict to so many GiB, this once; to the directory's capacity by default."),
    ] = None,
    as_json: _Json = False,
) -> None:
    """Remove what killed processes left, count anew, and evict what was used longest ago."""
    from kvferry.plan.units import size
    from kvferry.tiers.survey import a_cache
    from kvferry.tiers.upkeep import collect

    done = collect(a_cache(path), None if capacity_gib is None else int(capacity_gib * (1 << 30)))
    if as_json:
        print(json.dumps(asdict(done)))
        return
    print(f"{done.swept} leftovers removed; {done.evicted} files evicted, {size(done.evicted_bytes)}")
    print(f"{size(done.charged)} in use, evicted to {size(done.capacity)}")


def clear(
    path: _Path,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    as_json: _Json = False,
) -> None:
    """Remove everything of kvferry's in the directory, and nothing else."""
    from kvferry.plan.units import size
    from kvferry.tiers.survey import a_cache, totals
    from kvferry.tiers.upkeep import clear as remove

    root = a_cache(path)
    if not yes:
        found = totals(root)
        question = f"Remove {found.chunks} chunks, {size(found.total_bytes)}, from {root}?"
        try:
            sure = typer.confirm(question)
        except typer.Abort as error:
            raise ConfigError(
                "nothing is removed without an answer; pass --yes where nobody can give one"
            ) from error
        if not sure:
            print("Nothing was removed.")
            return
    files, total_bytes = remove(root)
    if as_json:
        print(json.dumps({"files": files, "total_bytes": total_bytes}))
    else:
        print(f"{files} files removed, {size(total_bytes)}")


def _said(facts: Mapping[str, object]) -> list[str]:
    """Facts that are short; of the form, which has a line for every field of every layer, the first."""
    said = [f"{fact} {value}" for fact, value in facts.items() if isinstance(value, str | int | float)]
    form = facts.get("form")
    return [_shown(one) for one in (*said, *(map(str, form[:1]) if isinstance(form, list) else ()))]


def _shown(text: str) -> str:
    """Text of a file that anybody may have written, for a terminal."""
    return "".join(each if each.isprintable() else "?" for each in text)


def _lines(words: list[str], width: int = 78) -> list[str]:
    """Words joined by commas, in lines of at most so many characters where a word is not longer."""
    lines: list[str] = []
    for word in words:
        if lines and len(lines[-1]) + len(word) + 3 <= width:
            lines[-1] += f", {word}"
        else:
            lines.append(word)
    return lines


def _age(then: float) -> str:
    seconds = max(0.0, time.time() - then)
    for each, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= each:
            return f"{seconds / each:.0f} {unit}"
    return f"{seconds:.0f} s"
