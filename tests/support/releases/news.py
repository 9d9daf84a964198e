"""Look for a newer release of vLLM, and say which assumptions of kvferry it breaks.

    python -m support.releases.news [RELEASE]

Without a release, the newest one of the package index is compared with those that kvferry works with. The
contract tests inspect its Python, over the compiled parts of the environment's CPU build. No engine runs.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from kvferry.engines.vllm.version import is_supported, supported_text
from support.releases.overlay import NoRelease, install

ROOT = Path(__file__).parents[3]
CONTRACT = (
    "tests/engine/test_contract.py",
    "tests/unit/engines/test_arguments.py",
    "tests/unit/engines/test_specs.py",
    "tests/unit/engines/test_arrivals.py",
    "tests/unit/engines/test_connector.py",
    "tests/unit/engines/content/test_backends.py",
    "tests/unit/serving/test_request_fields.py",
)
"""Tests that compare kvferry's assumptions with the vLLM that they import."""


def newest() -> str | None:
    """Return the newest release of vLLM in the package index; None if the index does not answer."""
    command = [sys.executable, "-m", "pip", "index", "versions", "--disable-pip-version-check", "vllm"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    found = re.match(r"vllm \((\S+)\)", done.stdout)
    return None if found is None else found.group(1)


def broken(release: str) -> list[str]:
    """Return the contract tests that fail on a release of vLLM, each with its reason.

    Args:
        release: full version of vLLM, such as ``0.34.0``.

    Raises:
        NoRelease: the package index has no such release, or cannot be reached.
    """
    with tempfile.TemporaryDirectory() as folder:
        install(release, Path(folder))
        # The folder goes first on the path, and `accept` lifts kvferry's refusal of unknown releases.
        path = os.pathsep.join((folder, *(str(ROOT / name) for name in ("src", ".", "tests"))))
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "--tb=no", "-p", "support.releases.accept", "-p",
             "no:cacheprovider", *CONTRACT],
            cwd=ROOT, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=False,
        )  # fmt: skip
    failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED ", "ERROR "))]
    if done.returncode and not failed:
        failed = [f"the tests did not run: {(done.stderr or done.stdout).strip().splitlines()[-1]}"]
    return failed


def report(
    release: str | None,
    find_newest: Callable[[], str | None] = newest,
    find_broken: Callable[[str], list[str]] = broken,
) -> list[str]:
    """Return the news as lines of text.

    Args:
        release: release of vLLM to inspect; None for the newest one, if kvferry does not work with it yet.
        find_newest, find_broken: sources of the news.
    """
    if release is None:
        release = find_newest()
        if release is None:
            return ["The package index does not answer; run this again on a machine that reaches it."]
        if is_supported(release):
            return [f"vLLM {release} is the newest release, and kvferry works with it."]
    try:
        failed = find_broken(release)
    except NoRelease as error:
        return [f"{error}."]
    if not failed:
        return [f"vLLM {release} passes all contract tests; kvferry works with {supported_text()} so far."]
    return [f"vLLM {release} breaks {len(failed)} contract tests:", *failed]


def main() -> None:
    """Print the news of the release that the first argument names, or of the newest one."""
    release = sys.argv[1] if len(sys.argv) > 1 else None
    sys.stdout.write("\n".join((*report(release), "")))


if __name__ == "__main__":
    main()
