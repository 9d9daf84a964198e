"""Look for a newer release of vLLM, and say which assumptions of kvferry it breaks.

    python -m support.releases.news RELEASE TEST...

If RELEASE is empty, the newest one of the package index is compared with those that kvferry works with. The
tests inspect its Python, over the compiled parts of the environment's CPU build. No engine runs.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from kvferry.engines.vllm.version import is_supported, supported_text
from support.releases.overlay import NoRelease, install

ROOT = Path(__file__).parents[3]


def newest() -> str | None:
    """Return the newest release of vLLM in the package index; None if the index does not answer."""
    command = [sys.executable, "-m", "pip", "index", "versions", "--disable-pip-version-check", "vllm"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    found = re.match(r"vllm \((\S+)\)", done.stdout)
    return None if found is None else found.group(1)


def broken(release: str, tests: Sequence[str]) -> list[str]:
    """Return the tests that fail on a release of vLLM, each with its reason.

    Args:
        release: full version of vLLM, such as ``0.34.0``.
        tests: files of tests that compare kvferry's assumptions with the vLLM that they import.

    Raises:
        NoRelease: the package index has no such release, or cannot be reached.
    """
    with tempfile.TemporaryDirectory() as folder:
        install(release, Path(folder))
        # The folder goes first on the path, and `accept` lifts kvferry's refusal of unknown releases.
        path = os.pathsep.join((folder, *(str(ROOT / name) for name in ("src", ".", "tests"))))
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "--tb=no", "-p", "support.releases.accept", "-p",
             "no:cacheprovider", "--continue-on-collection-errors", *tests],
            cwd=ROOT, env={**os.environ, "PYTHONPATH": path, "COLUMNS": "200"},
            capture_output=True, text=True, check=False,
        )  # fmt: skip
    failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED ", "ERROR "))]
    if done.returncode and not failed:
        failed = [f"the tests did not run: {(done.stderr or done.stdout).strip().splitlines()[-1]}"]
    return failed


def report(
    release: str | None,
    find_broken: Callable[[str], list[str]],
    find_newest: Callable[[], str | None] = newest,
) -> list[str]:
    """Return the news as lines of text.

    Args:
        release: release of vLLM to inspect; None for the newest one, if kvferry does not work with it yet.
        find_broken: function that returns the tests that fail on a release.
        find_newest: function that returns the newest release; None if the package index does not answer.
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
    return [f"vLLM {release} breaks assumptions of kvferry; these tests fail:", *failed]


def main() -> None:
    """Print the news of the release that the first argument names; the other arguments are tests."""
    release, *tests = sys.argv[1:]
    lines = report(release or None, partial(broken, tests=tests))
    sys.stdout.write("\n".join((*lines, "")))


if __name__ == "__main__":
    main()
