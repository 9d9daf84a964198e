"""Build and check a release, and print the command that uploads it: `make release`.

The steps are: compare the version with the change log, see that nothing is uncommitted, build a source
distribution and two wheels, check them as a package index does, try the wheels in new environments, write
checksums. A failed step ends the program with one sentence.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
CHECKSUMS = "SHA256SUMS"
_HEADING = re.compile(r"^## (\S+) \(([^)]*)\)$", re.MULTILINE)
_DATE = re.compile(r"\d{4}-\d{2}-\d{2}")


def version() -> str:
    """Return the version of this source tree."""
    text = (ROOT / "src" / "kvferry" / "__init__.py").read_text()
    found = re.search(r'^__version__ = "([^"]+)"$', text, re.MULTILINE)
    assert found is not None  # noqa: S101 - hatch reads the same line
    return found[1]


def problem_of_changelog(text: str, release: str) -> str:
    """Return the reason why a change log does not belong to a release; empty if it does.

    Args:
        text: text of the change log. Its first heading must have the version and a date.
        release: version of the release.

    >>> problem_of_changelog("## 0.2.0 (2026-11-24)", "0.2.0")
    ''
    >>> problem_of_changelog("## 0.2.0 (unreleased)", "0.2.0")
    "CHANGELOG.md: 0.2.0 is 'unreleased'; write the date of the release, such as 2026-01-31"
    >>> problem_of_changelog("## 0.1.0 (2026-11-24)", "0.2.0")
    'CHANGELOG.md begins with 0.1.0, and the version is 0.2.0; make them equal'
    """
    found = _HEADING.search(text)
    if found is None:
        return "CHANGELOG.md has no heading such as ## 0.1.0 (2026-01-31); add it"
    newest, date = found.groups()
    if newest != release:
        return f"CHANGELOG.md begins with {newest}, and the version is {release}; make them equal"
    if not _DATE.fullmatch(date):
        return f"CHANGELOG.md: {newest} is {date!r}; write the date of the release, such as 2026-01-31"
    return ""


def problem_of_tree(status: str) -> str:
    """Return the reason why the working tree cannot be released; empty if nothing is uncommitted.

    Args:
        status: output of ``git status --porcelain``.

    >>> problem_of_tree(" M README.md")
    'README.md is not committed; commit or remove what git status shows'
    >>> problem_of_tree("")
    ''
    """
    names = [line[3:] for line in status.splitlines()]
    return f"{names[0]} is not committed; commit or remove what git status shows" if names else ""


def build(out: Path) -> None:
    """Build the source distribution, a wheel for this platform and one for every system.

    auditwheel gives the wheel for this platform the tag of the oldest glibc that it works with. A package
    index refuses the tag that it has before, ``linux_x86_64``.

    Args:
        out: folder for the files. Its content is removed first.
    """
    shutil.rmtree(out, ignore_errors=True)
    here = out / "unrepaired"
    _run(sys.executable, "-m", "build", "--no-isolation", "--sdist", "--outdir", out, ROOT)
    _run(sys.executable, "-m", "build", "--no-isolation", "--wheel", "--outdir", here, ROOT)
    [wheel] = here.glob("*.whl")
    if wheel.name.endswith("-any.whl"):
        sys.exit(
            "release: the wheel has no native copy kernel; install a C compiler, and unset KVFERRY_PURE_WHEEL"
        )
    _run("auditwheel", "repair", "--wheel-dir", out, wheel)
    shutil.rmtree(here)
    _run(
        sys.executable,
        "-m",
        "build",
        "--no-isolation",
        "--wheel",
        "--outdir",
        out,
        ROOT,
        KVFERRY_PURE_WHEEL="1",
    )


def write_checksums(out: Path) -> Path:
    """Write the SHA-256 digests of a folder's files as ``sha256sum`` does, and return the path."""
    lines = [
        f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}" for path in sorted(out.iterdir())
    ]
    path = out / CHECKSUMS
    path.write_text("\n".join(lines) + "\n")
    return path


def _run(*command: str | Path, **environment: str) -> None:
    """Run a program, and end this one with a sentence if it fails."""
    tools = f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}"
    words: Sequence[str] = list(map(str, command))
    print("+", *words, flush=True)
    done = subprocess.run(words, check=False, cwd=ROOT, env={**os.environ, "PATH": tools, **environment})
    if done.returncode:
        sys.exit(
            f"release: {Path(words[0]).name} failed with exit code {done.returncode}; its output is above"
        )


def main(out: Path) -> None:
    """Make the files of a release in a folder."""
    command = ["git", "status", "--porcelain"]
    status = subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT).stdout
    release = version()
    for problem in (
        problem_of_changelog((ROOT / "CHANGELOG.md").read_text(), release),
        problem_of_tree(status),
    ):
        if problem:
            sys.exit(f"release: {problem}")
    build(out)
    files = sorted(out.iterdir())
    _run(sys.executable, "-m", "twine", "check", "--strict", *files)
    for wheel in out.glob("*.whl"):
        _run(sys.executable, ROOT / "scripts" / "try_wheel.py", wheel)
    print(f"\n{write_checksums(out).read_text()}")
    print(
        f"kvferry {release} is ready in {out}. Nothing was uploaded. To upload it, and to tag the commit:\n"
    )
    print("  twine upload", *files)
    print(f"  git tag -a v{release} -m 'kvferry {release}' && git push origin v{release}")


if __name__ == "__main__":
    main(ROOT / "dist")
