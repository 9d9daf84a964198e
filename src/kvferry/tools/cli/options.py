"""Options of commands, as fields of a dataclass, and what commands do with their values.

A command takes one dataclass whose fields are made by `option`, `count`, `flag` and `argument`. `command`
turns it into what Typer reads: a function with one parameter per field.
"""

from __future__ import annotations

import errno
import json
import os
import select
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import MISSING, Field, field, fields
from functools import wraps
from inspect import Parameter, Signature
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_type_hints

import typer

from kvferry.common.errors import ConfigError
from kvferry.common.files import replace_file
from kvferry.common.text import printable
from kvferry.common.units import parse_count
from kvferry.tools.report import Report

TYPER = "typer"
"""Key of a field's metadata: its `typer.Option` or `typer.Argument`."""
_T = TypeVar("_T")
INTERRUPTED = 130
"""Exit code of a command that Ctrl-C has ended."""
_FAILED = 1
# A full disk or quota, a limit of file sizes, a broken disk.
_NO_ROOM = frozenset((errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO))


def option(default: Any, metavar: str | None, help_text: str, *names: str, **settings: Any) -> Any:
    """Return a field for an option with a value.

    Args:
        default: value if the option is not given; `MISSING` if it must be given.
        names: names on the command line; without them, that of the field.
    """
    one = typer.Option(*names, metavar=metavar, help=help_text, **settings)
    return field(default=default, metadata={TYPER: one})


def count(default: int | None, help_text: str, least: int | None = None, most: int | None = None) -> Any:
    """Return a field for a count, such as a number of tokens, which may be written as ``32k``."""

    # A parser, because Typer's int does not read "32k", which vLLM takes.
    def parse(value: str | int) -> int:
        number = parse_count(str(value))  # Typer passes defaults too
        if least is not None and number < least:
            raise ValueError(f"give at least {least:,}")
        if most is not None and number > most:
            raise ValueError(f"give at most {most:,}")
        return number

    return option(default, "COUNT", help_text, parser=parse)


def flag(names: str, help_text: str, *, default: bool = False) -> Any:
    """Return a field for an option without a value, such as ``--json`` or ``--machine/--no-machine``."""
    return option(default, None, help_text, names)


def argument(metavar: str, help_text: str, default: Any = MISSING) -> Any:
    """Return a field for an argument. Without a default, users must give it."""
    return field(default=default, metadata={TYPER: typer.Argument(metavar=metavar, help=help_text)})


def command(function: Callable[[Any], None]) -> Callable[..., None]:
    """Return a command for Typer from a function whose only parameter is the dataclass of its options."""
    kind = next(iter(get_type_hints(function).values()))
    types = get_type_hints(kind)

    @wraps(function)
    def parsed(**values: Any) -> None:
        function(kind(**values))

    def parameter(one: Field[Any]) -> Parameter:
        default = Parameter.empty if one.default is MISSING else one.default
        annotation = Annotated[types[one.name], one.metadata[TYPER]]  # type: ignore[valid-type,name-defined]
        return Parameter(one.name, Parameter.KEYWORD_ONLY, default=default, annotation=annotation)

    # Typer reads the signature; it has no support for dataclasses.
    parsed.__signature__ = Signature([parameter(one) for one in fields(kind)])  # type: ignore[attr-defined]
    return parsed


def print_result(
    found: _T, plain: Callable[[_T], object], show: Callable[[_T, Report], None], *, as_json: bool
) -> None:
    """Print a result: what `plain` makes of it as JSON, or what `show` writes for people."""
    if as_json:
        print(json.dumps(plain(found)))
    else:
        show(found, Report.to_stdout())


def without_none(**options: Any) -> dict[str, Any]:
    """Return the given options, without those whose value is None."""
    return {name: value for name, value in options.items() if value is not None}


def check_folder(path: Path | None) -> None:
    """Check that a file can be created, before the work that fills it. Raise ConfigError if not."""
    # The file is not tried out: a command that fails later would leave it empty.
    if path is not None and not path.parent.is_dir():
        raise _cannot_write(path, errno.ENOENT)
    if path is not None and not os.access(path.parent, os.W_OK):
        raise _cannot_write(path, errno.EACCES)


def write_file(path: Path, text: str) -> None:
    """Write a file that an option names, as a whole. Raise ConfigError if it cannot be written."""
    with writing(path):
        replace_file(path, text)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Raise ConfigError for an OSError inside the ``with`` statement: the file cannot be written."""
    try:
        yield
    except OSError as error:
        raise _cannot_write(path, error.errno) from error


def _cannot_write(path: Path, number: int | None) -> ConfigError:
    return ConfigError(f"cannot write {path}: {os.strerror(number or 0)}; name a file that can be written")


@contextmanager
def flushed_output() -> Iterator[None]:
    """Flush standard output at the end of a ``with`` statement, and handle write errors.

    If the disk is full, print the error and exit with code 1. If the reader of a pipe has closed it
    (``kvferry cache ls DIR | head -1``), exit with code 1 without a message.

    Raises:
        SystemExit: the disk is full or failed, or the pipe is closed.
        OSError: another error, or an error that names a file, so that it does not concern standard output.
    """
    try:
        try:
            yield
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()  # at exit the interpreter would report an error badly
    except OSError as error:
        # An error that names a file does not concern standard output.
        unread = error.errno == errno.EPIPE
        if error.filename is not None or not (unread or error.errno in _NO_ROOM):
            raise
        # The interpreter would write what is buffered again at exit, and print an error of its own.
        with suppress(OSError, ValueError):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, sys.stdout.fileno())
            os.close(nowhere)
        if not unread:
            print_error(f"cannot write to standard output: {error.strerror}; check where it is redirected to")
        sys.exit(_FAILED)


def check_output() -> None:
    """Check that standard output can be written. Commands call this before a long task.

    The check does not detect a full disk.

    Raises:
        OSError: standard output cannot be written. `flushed_output` reports this error.
    """
    try:
        fd = sys.stdout.fileno()
    except (AttributeError, OSError, ValueError):
        return  # there is no standard output, and printed text is dropped
    os.write(fd, b"")  # fails on a device that is always full, such as /dev/full
    if not hasattr(select, "poll"):
        return  # Windows
    # The reader of a pipe may have gone: writing nothing does not show it.
    reader = select.poll()
    reader.register(fd, 0)
    if any(event & select.POLLERR for _, event in reader.poll(0)):
        raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))


def print_error(sentence: str) -> None:
    """Print an error message to standard error. Ignore write errors."""
    # A message may quote what a peer or a file says, with control characters of terminals.
    with suppress(OSError):
        print("\n".join(map(printable, f"kvferry: {sentence}".split("\n"))), file=sys.stderr)
