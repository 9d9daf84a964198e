"""`kvferry bench`: compare moving and keeping KV with what this machine can do."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import typer

from kvferry.common.errors import ConfigError
from kvferry.common.machine import require_linux
from kvferry.tools.cli.options import check_output, command, count, flag, option, print_result, without_none
from kvferry.tools.cli.usage import CommandGroup
from kvferry.tools.extras import BENCH, require

if TYPE_CHECKING:
    from kvferry.tools.models import ModelReading

_MAX_DEPTH = 256
_JSON_HELP = "Print JSON: all rounds, in seconds and bytes."
TRANSPORTS_HELP = "UCX_TLS for both processes, e.g. tcp,self; by default unchanged."
REPEATS_HELP = "Number of rounds; each measures every method once."


@dataclass(frozen=True)
class MovedModel:
    """The options of commands that move the KV cache of a model, which may get another shape."""

    geometry: str = option("Llama-3.1-8B", None, "Model whose KV cache to move, as `kvferry plan` takes it.")
    layers: int | None = option(None, None, "Number of layers; by default the model's.", min=1)
    kv_heads: int | None = option(None, None, "Number of KV heads; by default the model's.", min=1)
    head_dim: int | None = option(None, None, "Elements per head; by default the model's.", min=1)
    block_size: int | None = count(None, "Tokens per block; by default 16.", least=1)
    dtype: str = option("auto", None, "Element type: auto, float32, bfloat16, fp8, ...")

    def read(self) -> ModelReading:
        from kvferry.tools.measuring.simulated import read_geometry

        changes = {
            "num_hidden_layers": self.layers,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
        }
        return read_geometry(self.geometry, without_none(**changes), self.dtype)


def parse_names(text: str, known: Collection[str], name: str) -> tuple[str, ...]:
    """Parse a list of names, separated by commas. Raise ConfigError if one is not allowed."""
    names = tuple(text.split(","))
    if unknown := [one for one in names if one not in known]:
        raise ConfigError(f"--{name} {unknown[0]} is not known; choose from {', '.join(known)}")
    return names


def parse_layouts(text: str) -> tuple[str, ...]:
    """Return the memory layouts of a list in upper case. Raise ConfigError if one is unknown."""
    from kvferry.geometry import LAYOUTS

    return parse_names(text.upper(), LAYOUTS, "layouts")


@contextmanager
def progress_line() -> Iterator[Callable[[str], None]]:
    """Show a status line on standard error, and yield a function that replaces its text."""
    from rich.console import Console

    with Console(stderr=True).status("starting") as status:
        yield lambda text: status.update(f"{text} ...")


@contextmanager
def work_folder(path: Path | None) -> Iterator[Path]:
    """Yield an existing folder, or a new one in the user's cache, which is removed at the end.

    Raises:
        ConfigError: the folder does not exist, or a new one cannot be created.
    """
    if path is not None:
        if not path.is_dir():
            raise ConfigError(f"--path {path} is not a folder; create it, or name another")
        yield path
        return
    from kvferry.tiers import default_directory

    # On the disk of the default file tier: the folder for temporary files may be in memory.
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


app = typer.Typer(
    cls=CommandGroup,
    help="Measure how fast this machine moves and keeps KV.",
    no_args_is_help=True,
    callback=check_output,  # a measurement takes minutes, so a closed pipe is found before it
)


@dataclass(frozen=True)
class TransferOptions(MovedModel):
    """The options of `kvferry bench transfer`."""

    tokens: int = count(4096, "Length of the moved request, in tokens.", least=1)
    order: str = option(
        "scattered", None, "Order of block ids: scattered, as in a busy engine, or contiguous."
    )
    repeats: int = option(9, None, REPEATS_HELP, min=7)
    transports: str | None = option(None, None, TRANSPORTS_HELP)
    as_json: bool = flag("--json", _JSON_HELP)


@app.command()
@command
def transfer(options: TransferOptions) -> None:
    """Compare a KV transfer over NIXL with raw NIXL and memcpy.

    Moves KV between two processes. kvferry's time starts when a request's blocks are known and ends when the
    request may use them. It includes planning, posting, the lease check and the acknowledgement.
    """
    require_linux("kvferry bench transfer")
    require("kvferry bench transfer", BENCH)
    from kvferry.tools.bench.transfer import TransferJob, as_json, measure, show
    from kvferry.tools.measuring.simulated import ORDERS
    from kvferry.tools.plan.side import EngineSide

    if options.order not in ORDERS:
        raise ConfigError(f"--order {options.order} is not known; choose one of {', '.join(ORDERS)}")
    reading = options.read()
    if len(set(reading.cache.layers)) > 1:
        raise ConfigError(
            f"--geometry {options.geometry} has layers of several kinds; this command moves models whose "
            "layers are alike"
        )
    with progress_line() as progress:
        measured = measure(
            TransferJob(
                reading=reading,
                side=EngineSide(block_tokens=options.block_size),
                tokens=options.tokens,
                order=options.order,
                repeats=options.repeats,
                transports=options.transports,
            ),
            progress,
        )
    print_result(measured, as_json, show, as_json=options.as_json)


@dataclass(frozen=True)
class TiersOptions:
    """The options of `kvferry bench tiers`."""

    geometry: str = option(
        "Llama-3.1-8B", None, "Model whose chunks to store and load, as `kvferry plan` takes it."
    )
    layers: int = option(16, None, "Number of layers, instead of the model's.", min=1)
    layouts: str = option(
        "LBNHC,BHLNC", None, "Memory layouts to measure for the host tier, separated by commas."
    )
    block_size: int | None = count(None, "Tokens per block; by default 16.", least=1)
    depths: str = option("1,8,32", None, "Numbers of chunks in flight to measure, separated by commas.")
    path: Path | None = option(
        None, None, "Folder for files; by default a new one in the user's cache, removed at the end."
    )
    url: str | None = option(None, "URL", "Object storage, such as s3://bucket/path.", "--object")
    repeats: int = option(7, None, REPEATS_HELP, min=7)
    as_json: bool = flag("--json", _JSON_HELP)


@app.command()
@command
def tiers(options: TiersOptions) -> None:
    """Compare storing and loading chunks in tiers with raw storage.

    Compares host memory with memcpy, files with fio or threads with direct I/O, and objects with obstore.
    """
    require_linux("kvferry bench tiers")
    require("kvferry bench tiers", BENCH)
    from kvferry.tools.bench.tiers import TiersJob, as_json, measure, show
    from kvferry.tools.measuring.simulated import read_geometry
    from kvferry.tools.plan.side import EngineSide

    reading = read_geometry(options.geometry, {"num_hidden_layers": options.layers})
    layouts = parse_layouts(options.layouts)
    depths = _parse_depths(options.depths)
    with work_folder(options.path) as folder, progress_line() as progress:
        measured = measure(
            TiersJob(
                reading=reading,
                sides=tuple(EngineSide(layout=one, block_tokens=options.block_size) for one in layouts),
                depths=depths,
                repeats=options.repeats,
                path=folder,
                url=options.url,
            ),
            progress,
        )
    print_result(measured, as_json, show, as_json=options.as_json)


def _parse_depths(text: str) -> tuple[int, ...]:
    names = text.split(",")
    if wrong := [name for name in names if not name.isdecimal() or not 0 < int(name) <= _MAX_DEPTH]:
        raise ConfigError(f"--depths {wrong[0]} is not a number from 1 to {_MAX_DEPTH}")
    return tuple(sorted({int(name) for name in names}))
