"""Options and helpers that several measuring commands share."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, TypeAlias

import typer

from kvferry.cli.options import count_option
from kvferry.errors import ConfigError

Layers: TypeAlias = Annotated[
    int | None, typer.Option(min=1, help="Number of layers; by default the model's.")
]
KvHeads: TypeAlias = Annotated[
    int | None, typer.Option(min=1, help="Number of KV heads; by default the model's.")
]
HeadDim: TypeAlias = Annotated[
    int | None, typer.Option(min=1, help="Elements per head; by default the model's.")
]
BlockSize: TypeAlias = Annotated[int | None, count_option("Tokens per block; by default 16.", least=1)]
Dtype: TypeAlias = Annotated[str, typer.Option(help="Element type: auto, float32, bfloat16, fp8, ...")]
Transports: TypeAlias = Annotated[
    str | None, typer.Option(help="UCX_TLS for both processes, e.g. tcp,self; by default unchanged.")
]

REPEATS_HELP = "Number of rounds; each measures every method once."


def parse_names(text: str, known: Collection[str], option: str) -> tuple[str, ...]:
    """Parse the value of an option that is a list of names, separated by commas.

    Args:
        text: value of the option, such as ``lookup,hooks``.
        known: allowed names.
        option: name of the option, for the error message.

    Raises:
        ConfigError: a name is not allowed.
    """
    names = tuple(text.split(","))
    if unknown := [name for name in names if name not in known]:
        raise ConfigError(f"--{option} {unknown[0]} is not known; choose from {', '.join(known)}")
    return names


def parse_layouts(text: str) -> tuple[str, ...]:
    """Parse a list of memory layouts, and return their names in upper case.

    Args:
        text: names of layouts, separated by commas, in upper or lower case.

    Raises:
        ConfigError: a layout is unknown.
    """
    from kvferry.geometry.layout import LAYOUTS

    return parse_names(text.upper(), LAYOUTS, "layouts")


@contextmanager
def progress_line() -> Iterator[Callable[[str], None]]:
    """Show a status line on standard error, and yield a function that replaces its text."""
    from rich.console import Console

    with Console(stderr=True).status("starting") as status:
        yield lambda text: status.update(f"{text} ...")


@contextmanager
def work_folder(path: Path | None) -> Iterator[Path]:
    """Yield the folder for the files of a measurement.

    Args:
        path: existing folder, the value of `--path`; None for a new folder in the user's cache, which is
            removed at the end.

    Raises:
        ConfigError: the folder does not exist, or a new one cannot be created.
    """
    if path is not None:
        if not path.is_dir():
            raise ConfigError(f"--path {path} is not a folder; create it, or name another")
        yield path
        return
    from kvferry.tiers.paths import default_directory

    cache = Path(default_directory()).parent
    try:
        cache.mkdir(parents=True, exist_ok=True)
        made = TemporaryDirectory(prefix="bench-", dir=cache)
    except OSError as error:
        raise ConfigError(
            f"cannot create a folder in {cache}: {error.strerror}; name one with --path"
        ) from error
    with made as folder:
        yield Path(folder)
