"""Open a trace of any known format."""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set as AbstractSet
from pathlib import Path

import msgspec

from kvferry.common.errors import ConfigError
from kvferry.common.text import shown
from kvferry.tools.replay.trace.aiperf import AIPerfTrace
from kvferry.tools.replay.trace.base import MAX_TOKENS, Trace, TraceFile
from kvferry.tools.replay.trace.conversations import ConversationTrace
from kvferry.tools.replay.trace.csv_trace import CsvTrace, csv_columns
from kvferry.tools.replay.trace.hashed import HashedTrace
from kvferry.tools.replay.trace.recorded import RecordedTrace
from kvferry.tools.replay.trace.spans import SpanTrace
from kvferry.tools.replay.trace.weka import WekaTrace
from kvferry.tools.replay.trace.workload import DESCRIBED, WorkloadTrace

# Readers of JSON lines, by keys of the first line.
_BY_KEYS: Sequence[tuple[AbstractSet[str], Callable[[TraceFile, int | None], Trace]]] = (
    ({"kvferry_trace"}, lambda file, _: RecordedTrace(file)),
    ({"session_id", "input_length"}, AIPerfTrace),
    ({"hash_ids"}, HashedTrace),
    ({"chunk_hashes"}, HashedTrace),
    ({"requests", "block_size"}, lambda file, _: WekaTrace(file)),
    ({"resourceSpans"}, SpanTrace),
)
_FORMATS = (
    'JSON lines with "hash_ids" and "input_length" (Mooncake, Bailian, kvcache-simulator, AIPerf), '
    '"chunk_hashes" (LMCache), "requests" (Weka) or "resourceSpans" (OpenTelemetry), a JSON array of '
    "conversations (vLLM), CSV with the columns arrival, prompt_tokens and output_tokens, a trace recorded "
    "by kvferry, or a description such as users=500,turns=6"
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
    for wanted, reader in _BY_KEYS:
        if wanted <= keys.keys():
            return reader(file, unit_tokens)
    if line.lstrip().startswith(b"["):
        return ConversationTrace(file, unit_tokens)
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
