"""Install the packages of lock files with uv, set up as pip is on this machine.

    python scripts/install.py -r requirements/dev.lock [--python PATH | --target FOLDER]

Arguments are those of ``uv pip install --no-deps``. uv takes a tenth of pip's time for three gigabytes of
wheels, but reads none of pip's settings, by which many machines name a mirror or a folder of wheels.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Mapping

UV_NAMES = {
    "index-url": "UV_DEFAULT_INDEX",
    "extra-index-url": "UV_INDEX",
    "find-links": "UV_FIND_LINKS",
    "cert": "SSL_CERT_FILE",
    "default-timeout": "UV_HTTP_TIMEOUT",
}
"""uv's environment variable for each of pip's settings."""


def uv_environment(pip_settings: str, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment in which uv does what pip would do.

    Args:
        pip_settings: output of ``pip config list``: lines ``global.index-url='…'``. A later section wins, and
            variables of the environment (``:env:``) win over all files.
        environment: environment of this process. Variables of uv that it has stay as they are.
    """
    found: dict[str, str] = {}
    lines = [line for line in pip_settings.splitlines() if "=" in line]
    for line in sorted(lines, key=lambda line: line.startswith(":env:")):
        name, _, value = line.partition("=")
        name = name.rpartition(".")[2]
        if name in UV_NAMES:
            # Folders that do not exist are passed over by pip, and are errors of uv.
            places = [place for place in ast.literal_eval(value).split() if not place.startswith("file:")]
            if places:
                found[UV_NAMES[name]] = (" " if name == "extra-index-url" else ",").join(places)
    # pip takes the best version of all indexes; uv would stop at the first that has the package.
    return {"UV_INDEX_STRATEGY": "unsafe-best-match", **found, **environment}


def main() -> int:
    """Run uv in this interpreter's environment, and return its exit code."""
    settings = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True
    ).stdout
    where = [] if {"--python", "--target"} & {*sys.argv} else ["--python", sys.executable]
    command = [sys.executable, "-m", "uv", "pip", "install", "--quiet", "--no-deps", *where, *sys.argv[1:]]
    return subprocess.run(command, env=uv_environment(settings, os.environ), check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
