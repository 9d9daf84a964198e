"""Build hook: compile the native kernel, which copies and digests, into the wheel.

Without a C compiler, or if the compiler fails, the wheel contains no kernel and numpy works instead. The
same holds if the environment variable KVFERRY_PURE_WHEEL is 1: such a wheel fits every system.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

SOURCE = "src/kvferry/memory/strided_copy.c"
LIBRARY = "src/kvferry/memory/_strided_copy.so"
PURE = "KVFERRY_PURE_WHEEL"


class NativeCopies(BuildHookInterface[Any]):
    """Compiles `SOURCE` to `LIBRARY`, in wheels and in editable installations."""

    _folder: tempfile.TemporaryDirectory[str] | None = None

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile the kernel, and mark the wheel as one for this platform."""
        if self.target_name != "wheel" or os.environ.get(PURE) == "1":
            return
        if version == "editable":
            library = Path(self.root, LIBRARY)
        else:  # The source tree may be read-only, and an editable installation may be using its library.
            self._folder = tempfile.TemporaryDirectory()
            library = Path(self._folder.name, Path(LIBRARY).name)
        if why := compiled(Path(self.root, SOURCE), library):
            self.app.display_warning(f"kvferry copies with numpy instead of its native kernel: {why}")
            return
        platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{platform}"
        if version != "editable":
            build_data["force_include"][str(library)] = LIBRARY.removeprefix("src/")

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:  # noqa: ARG002
        """Remove the compiled file, which the wheel now contains."""
        if self._folder is not None:
            self._folder.cleanup()


def compiled(source: Path, library: Path) -> str:
    """Compile a C file to a shared library; return the reason why this is impossible, or ``""``.

    An older library is replaced in one step, because processes may be loading it. It is removed if the
    compilation fails.
    """
    try:
        compiler = shlex.split(os.environ.get("CC", "")) or ["cc"]
    except ValueError as error:
        return f"CC is {os.environ['CC']!r}: {error}"
    new = library.with_name(f"{library.stem}.{os.getpid()}.so")  # `.gitignore` keeps it out of wheels
    if shutil.which(compiler[0]) is None:
        why = f"there is no C compiler ({compiler[0]})"
    else:
        command = [*compiler, "-O3", "-shared", "-fPIC", "-o", str(new), str(source)]
        ended = subprocess.run(command, capture_output=True, text=True, check=False)
        if ended.returncode == 0 and new.exists():
            new.replace(library)
            return ""
        why = f"{compiler[0]} failed: {' '.join(ended.stderr.split())[:500] or 'no message'}"
    for leftover in (new, library):
        leftover.unlink(missing_ok=True)
    return why
