"""Options and helpers that several measuring commands share."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from kvferry.tools.cli.options import count, option, without_none
from kvferry.errors import ConfigError

if TYPE_CHECKING:
    from kvferry.geometry.models import ModelReading

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
        """Return what the model keeps, with the changes of its shape."""
        from kvferry.tools.measuring.simulated import read_geometry

        changes = {
            "num_hidden_layers": self.layers,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
        }
        return read_geometry(self.geometry, without_none(**changes), self.dtype)


def parse_names(text: str, known: Collection[str], name: str) -> tuple[str, ...]:
    """Parse the value of an option that is a list of names, separated by commas.

    Raises:
        ConfigError: a name is not allowed.
    """
    names = tuple(text.split(","))
    if unknown := [one for one in names if one not in known]:
        raise ConfigError(f"--{name} {unknown[0]} is not known; choose from {', '.join(known)}")
    return names


def parse_layouts(text: str) -> tuple[str, ...]:
    """Parse a list of memory layouts, and return their names in upper case.

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
