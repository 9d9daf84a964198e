"""A pytest plugin that lets kvferry be imported with any vLLM, so that the contract tests can inspect it.

Engines are processes of their own and still refuse such a release.
"""

from __future__ import annotations

import pytest

from kvferry.engines.vllm import version


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests():
    """Accept the installed vLLM, before any module is imported that checks it."""
    found = version.vllm_version()
    if found is not None:
        version.SUPPORTED = (*version.SUPPORTED, version.minor_release(found))
