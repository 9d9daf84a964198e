"""Packages that tests need beside the environment, in folders of it that `make .venv/.NAME` makes."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest


def apart(name: str) -> Path:
    """Return the folder of `.venv/.NAME`, which may be missing."""
    return Path(sys.prefix, name)


def needs(name: str) -> pytest.MarkDecorator:
    """Skip a test if a folder is missing."""
    return pytest.mark.skipif(
        not apart(name).is_dir(), reason=f"{apart(name)} is missing; `make .venv/.{name}` makes it"
    )
