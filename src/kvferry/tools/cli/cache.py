"""`kvferry cache`: inspect and clean a directory or an object store of chunks, or the tiers of an engine.

The latter is asked through its admin API.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from kvferry.common.errors import ConfigError
from kvferry.common.text import printable
from kvferry.common.units import counted, format_age, format_bytes, parse_size
from kvferry.tools.cli.usage import CommandGroup
from kvferry.tools.report import wrapped

if TYPE_CHECKING:
    from kvferry.tiers import CacheAdmin


# Exit code if a check fails or nothing was done, so that a script can tell.
_BAD = 1
# The engine answers in its next step, and a step may take seconds.
_SECONDS = 15.0

_Where = Annotated[
    str, typer.Argument(metavar="PATH|URL", help="Directory of a file tier, or URL of an object tier.")
]
_Options = Annotated[
    list[str] | None,
    typer.Option(
        "--option",
        "-o",
        metavar="NAME=VALUE",
        help="Object storage option, such as endpoint or region; repeatable. Credentials come from the "
        "environment.",
    ),
]
_Json = Annotated[bool, typer.Option("--json", help="Print JSON, in bytes and seconds since 1970.")]


_Engine = Annotated[
    str,
    typer.Option("--engine", metavar="URL", help="Admin API of an engine, such as http://127.0.0.1:5700."),
]
_Secret = Annotated[
    str | None,
    typer.Option(
        "--secret-file", metavar="FILE", help="The engine's secret_file; by default this machine's key."
    ),
]
_Tokens = Annotated[
    str,
    typer.Option(
        "--tokens",
        metavar="FILE",
        help="JSON list of token ids, or vLLM's answer to /tokenize; - for standard input.",
    ),
]
_Salt = Annotated[str | None, typer.Option("--salt", help="Cache salt of the requests.")]

app = typer.Typer(
    cls=CommandGroup, help="Inspect and clean stored KV, or that of a running engine.", no_args_is_help=True
)


@app.command()
def ls(where: _Where, option: _Options = None, as_json: _Json = False) -> None:
    """List the namespaces: model, size and last use."""
    from kvferry.tiers import namespace_usage

    cache = _cache(where, option)
    found, now = namespace_usage(cache), time.time()
    if as_json:
        print(json.dumps([asdict(one) for one in found]))
        return
    for one in found:
        print(*wrapped(f"{one.namespace[:16]}  {one.name or 'no model named'}", hanging=2), sep="\n")
        if texts := _fact_texts(one.facts):
            print(*wrapped(", ".join(texts), 2, 2), sep="\n")
        summary = (
            f"{counted(one.chunks, 'chunk')}, {counted(one.tokens, 'token')}, {format_bytes(one.total_bytes)}"
        )
        if one.oldest is not None and one.newest is not None:
            verb = "last used" if cache.records_use else "stored"
            summary += (
                f"; {verb} {format_age(now - one.newest)} ago, the oldest {format_age(now - one.oldest)} ago"
            )
        print(*wrapped(summary, 2, 2), sep="\n")
        if one.unreadable:
            print(f"  {one.unreadable} of them cannot be read; see kvferry cache verify")
    if not found:
        print("No namespaces: no engine has stored chunks here.")


@app.command()
def stat(where: _Where, option: _Options = None, as_json: _Json = False) -> None:
    """Show how much the cache holds, and its capacity."""
    from kvferry.tiers import cache_totals

    cache = _cache(where, option)
    found = cache_totals(cache)
    if as_json:
        print(json.dumps(asdict(found)))
        return
    namespaces, budget = counted(found.namespaces, "namespace"), ""
    if found.write_per_day is not None and found.write_budget_left is not None:
        left = f"{found.write_budget_left:.0%} of an hour's budget is left"
        budget = f"{format_bytes(found.write_per_day)} a day; {left}"
    for name, value in (
        ("capacity", cache.no_capacity if found.capacity is None else format_bytes(found.capacity)),
        ("in use", format_bytes(found.total_bytes)),
        ("may be written", budget),
        ("free on disk", "" if found.free is None else format_bytes(found.free)),
        ("free inodes", "" if found.free_files is None else f"{found.free_files:,}"),
        ("chunks", f"{found.chunks:,} of {namespaces}, {format_bytes(found.chunk_bytes)}"),
        ("being written", f"{found.temporary}, {format_bytes(found.temporary_bytes)}"),
        ("quarantined", f"{found.quarantined}, {format_bytes(found.quarantined_bytes)}"),
    ):
        if value:
            print(f"{name:<14} {value}")


@app.command()
def verify(
    where: _Where,
    quarantine: Annotated[bool, typer.Option("--quarantine", help="Move bad files to quarantine.")] = False,
    option: _Options = None,
    as_json: _Json = False,
) -> None:
    """Read every chunk and check every byte.

    Exit code 1 if a chunk is damaged.
    """
    from kvferry.tiers import verify_all

    found = verify_all(_cache(where, option), quarantine=quarantine)
    if as_json:
        print(json.dumps(asdict(found)))
    else:
        for one in found.bad:
            print(printable(str(one.path)))
            print(*wrapped(f"{one.why}{'; moved to quarantine' if one.moved else ''}", 2), sep="\n")
        print(f"{counted(found.chunks, 'chunk')}, {format_bytes(found.total_bytes)}: {len(found.bad)} bad")
        if found.other_versions:
            print(f"{found.other_versions} of other format versions; run the release that wrote them")
    if found.bad:
        raise typer.Exit(_BAD)


@app.command()
def gc(
    where: _Where,
    capacity: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE", help="Capacity for this run, such as 10GiB; by default that of the directory."
        ),
    ] = None,
    option: _Options = None,
    as_json: _Json = False,
) -> None:
    """Remove leftovers, and evict down to the capacity.

    Also recounts the size. Leftovers are files of killed processes. Chunks that were used or stored least
    recently are evicted first.
    """
    done = _cache(where, option).collect(None if capacity is None else parse_size(capacity))
    if as_json:
        print(json.dumps(asdict(done)))
        return
    print(
        f"{counted(done.swept, 'leftover')} removed; {counted(done.evicted, 'file')} evicted, "
        f"{format_bytes(done.evicted_bytes)}"
    )
    print(f"{format_bytes(done.charged)} in use, evicted to {format_bytes(done.capacity)}")


@app.command()
def clear(
    where: _Where,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask for confirmation.")] = False,
    option: _Options = None,
    as_json: _Json = False,
) -> None:
    """Remove all of kvferry's files, and no others."""
    from kvferry.tiers import cache_totals

    cache = _cache(where, option)
    if not yes:
        found = cache_totals(cache)
        question = (
            f"Remove {counted(found.chunks, 'chunk')}, {format_bytes(found.total_bytes)}, from {cache.where}?"
        )
        # Without a terminal there is no answer, and a script must not lose a cache by an accident.
        try:
            sure = typer.confirm(question)
        except typer.Abort as error:
            raise ConfigError(
                "nothing is removed without confirmation; pass --yes to confirm in a script"
            ) from error
        if not sure:
            print("Nothing was removed.")
            return
    files, total_bytes = cache.clear()
    if as_json:
        print(json.dumps({"files": files, "total_bytes": total_bytes}))
    else:
        print(f"{counted(files, 'file')} removed, {format_bytes(total_bytes)}")


@app.command()
def lookup(
    engine: _Engine, tokens: _Tokens, salt: _Salt = None, secret_file: _Secret = None, as_json: _Json = False
) -> None:
    """Show how many tokens of a prompt each of an engine's tiers has."""
    found = ask(engine, secret_file, "lookup", {"tokens": read_tokens(tokens), "salt": salt})
    if as_json:
        print(json.dumps(found))
        return
    for tier, count in found["tiers"].items():
        print(f"{printable(tier):<14} {count:,} of {counted(found['tokens'], 'token')}")


@app.command()
def pin(
    engine: _Engine,
    name: Annotated[str, typer.Option("--name", help="Name of the pin.")],
    tokens: Annotated[
        str | None,
        typer.Option(
            "--tokens",
            metavar="FILE",
            help="JSON list of token ids, or vLLM's answer to /tokenize; without it, the pin is removed.",
        ),
    ] = None,
    salt: _Salt = None,
    secret_file: _Secret = None,
    as_json: _Json = False,
) -> None:
    """Pin a prompt in an engine's host memory, or unpin it.

    Exit code 1 if nothing is pinned, or no pin has the name.
    """
    if tokens is None:
        found = ask(engine, secret_file, "unpin", {"name": name})
        done = found["unpinned_chunks"]
        text = f"no longer pinned: {counted(done, 'chunk')}" if done else f"no pin is named {printable(name)}"
    else:
        body = {"tokens": read_tokens(tokens), "salt": salt, "name": name}
        found = ask(engine, secret_file, "pin", body)
        done = found["pinned_chunks"]
        text = _pinned_text(done, found["host_chunks"], found["chunks"])
    print(json.dumps(found) if as_json else text)
    if not done:
        raise typer.Exit(_BAD)


def _pinned_text(pinned: int, in_host: int, of_prompt: int) -> str:
    if not in_host:
        chunks = counted(of_prompt, "chunk")
        return f"host memory has none of the prompt's {chunks}; send the engine the prompt first"
    if pinned < in_host:
        return (
            f"pinned: {pinned:,} of {counted(in_host, 'chunk')} in host memory; pins hold at most half of it"
        )
    return f"pinned: {counted(pinned, 'chunk')}, those of the prompt's {of_prompt:,} that are in host memory"


@app.command()
def prefetch(
    engine: _Engine,
    tokens: Annotated[
        str | None,
        typer.Option(
            "--tokens", metavar="FILE", help="JSON list of token ids, or vLLM's answer to /tokenize."
        ),
    ] = None,
    session: Annotated[
        str | None,
        typer.Option("--session", metavar="ID", help="The session_id of requests that have ended."),
    ] = None,
    salt: _Salt = None,
    secret_file: _Secret = None,
    as_json: _Json = False,
) -> None:
    """Bring a prompt, or a session's last one, to host memory.

    The engine goes on reading after this command. Exit code 1 if no tier has anything of it.
    """
    body = {"tokens": None if tokens is None else read_tokens(tokens), "session": session, "salt": salt}
    found = ask(engine, secret_file, "prefetch", body)
    chunks, here = found["chunks"], found["host_chunks"]
    if as_json:
        print(json.dumps(found))
    elif not chunks:
        print("No tier has a prefix of it that can be loaded.")
    else:
        print(f"{counted(chunks, 'chunk')}: {here} in host memory, {chunks - here} to be read")
    if not chunks:
        raise typer.Exit(_BAD)


@app.command()
def end_session(
    engine: _Engine,
    session: Annotated[str, typer.Option("--session", metavar="ID", help="The session_id of its requests.")],
    salt: _Salt = None,
    secret_file: _Secret = None,
    as_json: _Json = False,
) -> None:
    """Have an engine evict first what only one session has used.

    Exit code 1 if there is nothing.
    """
    found = ask(engine, secret_file, "end_session", {"session": session, "salt": salt or ""})
    done = found["cold_chunks"]
    print(json.dumps(found) if as_json else f"{counted(done, 'chunk')} will be evicted first")
    if not done:
        raise typer.Exit(_BAD)


@app.command()
def drop(engine: _Engine, salt: _Salt = None, secret_file: _Secret = None, as_json: _Json = False) -> None:
    """Drop chunks from an engine's host memory, or those of a salt."""
    found = ask(engine, secret_file, "drop", {"salt": salt})
    if as_json:
        print(json.dumps(found))
    elif salt is None:
        print(f"dropped from host memory: {counted(found['dropped_chunks'], 'chunk')}")
    else:
        print("The engine finds no chunks of this salt any more.")


@app.command()
def tenant() -> None:
    """Print the digest of a cache salt for the setting tenants. The salt is read from standard input."""
    from kvferry.keys import tenant_of

    # Lines of a file, or of echo, end with a line break, and salts do not.
    salt = sys.stdin.buffer.read().rstrip(b"\r\n").decode(errors="replace")
    if not salt or "\ufffd" in salt:
        found = "is no text in UTF-8" if salt else "is empty"
        raise ConfigError(
            f'standard input {found}; give a cache salt: printf %s "$SALT" | kvferry cache tenant'
        )
    print(tenant_of(salt, None).hex())


@app.command()
def drain(engine: _Engine, secret_file: _Secret = None, as_json: _Json = False) -> None:
    """Stop an engine's exchange of KV, so that it can be replaced.

    Exit code 1 while leases, loads or writes are under way: repeat the command until it is 0.
    """
    found = ask(engine, secret_file, "drain", {})
    if as_json:
        print(json.dumps(found))
    elif found["drained"]:
        print("drained: no lease is held, and no load or write is under way")
    else:
        print(
            f"left: {counted(found['leases'], 'lease')}, {counted(found['loads'], 'load')}, "
            f"{counted(found['owed_chunks'], 'chunk')} to write"
        )
    if not found["drained"]:
        raise typer.Exit(_BAD)


def _cache(where: str, options: list[str] | None) -> CacheAdmin:
    """Open the cache at a path or URL. Raise ConfigError if it does not exist or cannot be accessed."""
    from kvferry.tiers import is_url

    if is_url(where):
        from kvferry.tiers import BucketAdmin

        return BucketAdmin(where, _parse_pairs(options or []))
    if options:
        raise ConfigError(f"--option is for URLs of object storage; {where} is a path")
    from kvferry.tiers import DirectoryAdmin

    return DirectoryAdmin(where)


def _parse_pairs(texts: list[str]) -> dict[str, str]:
    """Parse texts such as ``name=value``. Raise ConfigError for one without ``=``, or a repeated name."""
    found: dict[str, str] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or name in found:
            raise ConfigError(f"--option {name}: give each name once, with its value, as in region=eu-west-1")
        found[name] = value
    return found


def _fact_texts(facts: Mapping[str, object]) -> list[str]:
    """Return texts such as ``model NAME`` for the properties of a namespace that are texts or numbers."""
    texts = [f"{fact} {value}" for fact, value in facts.items() if isinstance(value, str | int | float)]
    form = facts.get("form")
    # The first line of the canonical form describes the chunks; the others list their units.
    return [*texts, *(map(str, form[:1]) if isinstance(form, list) else ())]


class _Tokenized(msgspec.Struct, frozen=True):
    """The answer of vLLM's ``POST /tokenize``."""

    tokens: list[int]


def ask(engine: str, secret_file: str | None, call: str, body: Mapping[str, object]) -> dict[str, Any]:
    """Call the admin API of an engine, and return its answer.

    `secret_file` is the engine's setting; None for this machine's key.

    Raises:
        ConfigError: the key cannot be read, the engine does not answer, or it refuses the call.
    """
    import httpx

    from kvferry.transport import admin_token, existing_keys, key_location

    keys = existing_keys(secret_file)
    if keys is None:
        raise ConfigError(
            f"there is no key at {key_location(secret_file).path}; start the engine first, or give its "
            "--secret-file"
        )
    try:
        answer = httpx.post(
            f"{engine.rstrip('/')}/v1/{call}",
            content=msgspec.json.encode(body),
            headers={"Authorization": f"Bearer {admin_token(keys)}"},
            timeout=_SECONDS,
            trust_env=False,  # a proxy must not get the token
        )
        found = msgspec.json.decode(answer.content, type=dict[str, Any])
    except (httpx.HTTPError, httpx.InvalidURL, msgspec.DecodeError) as error:
        raise _no_admin_api(engine, str(error)) from error
    if answer.is_error:
        reason = found.get("error")
        if not isinstance(reason, str):  # vLLM's API, for example
            raise _no_admin_api(engine, f"status {answer.status_code}")
        raise ConfigError(f"{printable(engine)}: {printable(reason)}")
    return found


def _no_admin_api(engine: str, reason: str) -> ConfigError:
    return ConfigError(
        f"{printable(engine)} is not an admin API ({printable(reason)}); give the host and port of the "
        "engine's setting admin, which are not those of its OpenAI endpoint"
    )


def read_tokens(file: str) -> list[int]:
    """Read token ids from a JSON list or an answer of ``POST /tokenize``; ``-`` is standard input.

    Raises:
        ConfigError: the file cannot be read, or holds neither.
    """
    try:
        data = sys.stdin.buffer.read() if file == "-" else Path(file).read_bytes()
        found = msgspec.json.decode(data, type=list[int] | _Tokenized)
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(
            f"--tokens {file}: {printable(str(error))}; give a JSON list of token ids, or the answer of "
            "vLLM's POST /tokenize"
        ) from error
    return found.tokens if isinstance(found, _Tokenized) else found
