"""A pytest plugin that lets kvferry be imported with any vLLM, so that the contract tests can inspect it.

Engines are processes of their own and still refuse such a release.
"""

from __future__ import annotations

from kvferry.engines.vllm import version

found = version.vllm_version()
if found is not None:
    version.SUPPORTED = (*version.SUPPORTED, version.minor_release(found))
