"""`python -m benchmarks gpu_check`."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from kvferry.common.errors import ConfigError
from kvferry.tools.cli.bench import parse_names, progress_line


def gpu_check(
    device: Annotated[str, typer.Option(help="cuda, or cpu to test the checks themselves.")] = "cuda",
    parts: Annotated[str, typer.Option(help="Checks to run, with commas between them.")] = "",
    out: Annotated[Path | None, typer.Option(help="File to write the report to, in Markdown.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Small sizes: bytes matter, speeds do not.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Check and time KV on a GPU.

    Reads GPU memory between two processes, gathers and scatters, copies to and from host memory, and checks
    the order after a forward. With vLLM, hands prompts over between two engines, beside NixlConnector. Needs
    torch, triton, nixl and kvferry; takes less than ten minutes, and 8 GiB of memory on the GPU and on the
    host. Ends with exit code 1 if a check failed.
    """
    from benchmarks.gpu_check import report
    from benchmarks.gpu_check.job import SMALL, GpuCheckJob
    from benchmarks.gpu_check.measure import CHECKS, measure
    from kvferry.tools.measuring.gpus import source_and_destination

    source_and_destination(device)
    if device not in ("cpu", "cuda"):
        raise ConfigError(f"--device {device} is not known; choose one of cuda, cpu")
    names = parse_names(parts, CHECKS, "parts") if parts else tuple(CHECKS)
    job = replace(SMALL, device=device) if quick or device == "cpu" else GpuCheckJob(device=device)
    with progress_line() as progress:
        found = measure(job, names, progress)
    text = report.as_markdown(found)
    if out is not None:
        try:
            out.write_text(text)
        except OSError as error:
            raise ConfigError(f"cannot write {out}: {error.strerror}; choose another --out") from error
    print(json.dumps(report.as_json(found)) if as_json else text)
    if not report.passed(found):
        raise typer.Exit(1)
