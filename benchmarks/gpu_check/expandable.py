"""Memory in expandable segments of torch's allocator: NIXL must refuse it, or read it right."""

from __future__ import annotations

import json
import os
import subprocess
import sys

from benchmarks.gpu_check.job import GpuCheckJob
from benchmarks.gpu_check.result import CheckResult, CheckState

_NAME = "expandable segments"
_SECONDS = 120.0
_WRONG = "bytes are not what they must be"


def check_expandable(job: GpuCheckJob) -> CheckResult:
    """Run the check of READs in a process whose allocator uses expandable segments.

    Args:
        job: device.
    """
    if not job.on_gpu:
        return CheckResult(_NAME, CheckState.NOT_RUN, "Only CUDA's allocator has them.")
    ended = subprocess.run(
        [sys.executable, "-m", "benchmarks", "gpu_check", "--parts", "reads", "--quick", "--json"],
        env=os.environ | {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"},
        capture_output=True,
        text=True,
        timeout=_SECONDS,
        check=False,
    )
    return judge_expandable(ended.stdout, ended.stderr)


def judge_expandable(out: str, err: str) -> CheckResult:
    """Return the result, from what the process printed. Wrong bytes fail; an error is a refusal.

    Args:
        out: standard output, JSON of the report.
        err: standard error.
    """
    try:
        (found,) = json.loads(out)["checks"]
    except (ValueError, KeyError):
        last = (err.strip().splitlines() or ["it said nothing"])[-1]
        return CheckResult(_NAME, CheckState.PASSED, f"Refused: the process ended ({last}).")
    if found["state"] == CheckState.PASSED:
        return CheckResult(_NAME, CheckState.PASSED, "NIXL reads such memory, and every byte arrived.")
    if _WRONG in found["says"]:
        return CheckResult(_NAME, CheckState.FAILED, found["says"])
    return CheckResult(_NAME, CheckState.PASSED, f"Refused: {found['says']}")
