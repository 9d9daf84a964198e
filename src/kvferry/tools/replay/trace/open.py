"""Open a trace of any known format."""

from __future__ import annotations

from pathlib import Path

import msgspec

from kvferry.common.errors import ConfigError
from kvferry.common.text import shown
from kvferry.tools.replay.trace.base import MAX_TOKENS, Trace, TraceFile
from kvferry.tools.replay.trace.csv_trace import CsvTrace, csv_columns
from kvferry.tools.replay.trace.hashed import HashedTrace
from kvferry.tools.replay.trace.recorded import RecordedTrace
from kvferry.tools.replay.trace.workload import DESCRIBED, WorkloadTrace

_FORMATS = (
    'JSON lines with "hash_ids" and "input_length" (Mooncake, Bailian, kvcache-simulator), CSV with the '
    "columns arrival, prompt_tokens and output_tokens, a trace recorded by kvferry, or a description such as "
    "users=500,turns=6"
)
_SHOWN_CHARACTERS = 80


def open_trace(path: Path | str, unit_tokens: int | None = None) -> Trace:
    """Open a trace. The first line of a file tells its format.

    Args:
        path: path of the file, plain or compressed with gzip; ``-`` for standard input. A text such as
            ``users=500,turns=6`` describes a workload instead.
        unit_tokens: number of tokens per unit of a trace that does not state it itself; None for the usual
            number of its format, such as 512 for Mooncake.
    """
    if unit_tokens is not None and not 1 <= unit_tokens <= MAX_TOKENS:
        raise ConfigError(f"--unit-tokens is {unit_tokens}; give a number from 1 to {MAX_TOKENS:,}")
    if DESCRIBED.fullmatch(str(path)):
        return WorkloadTrace(str(path), unit_tokens)
    file = TraceFile(path)
    _, line = file.first_line()
    keys = _keys(line)
    if "kvferry_trace" in keys:
        return RecordedTrace(file)
    if "hash_ids" in keys:
        return HashedTrace(file, unit_tokens)
    if csv_columns(line):
        return CsvTrace(file, unit_tokens)
    found = shown(line.decode(errors="replace").strip(), _SHOWN_CHARACTERS)
    raise ConfigError(f"{file.name} is no trace in a known format: it begins with {found}; give {_FORMATS}")


def _keys(line: bytes) -> dict[str, msgspec.Raw]:
    """Return the values of a JSON object by their keys; nothing if a line is anything else."""
    try:
        keys: dict[str, msgspec.Raw] = msgspec.json.decode(line, type=dict[str, msgspec.Raw])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return {}
    return keys
