"""The image's Dockerfile. No test builds it: that needs a registry and a CUDA image of several gigabytes."""

from __future__ import annotations

import re
from pathlib import Path

from kvferry.engines.vllm.version import TESTED

ROOT = Path(__file__).parents[2]
DOCKERFILE = (ROOT / "docker" / "Dockerfile").read_text()


def test_the_image_has_the_tested_vllm() -> None:
    [version] = re.findall(r"^ARG VLLM_VERSION=(\d+\.\d+)\.\d+$", DOCKERFILE, re.MULTILINE)
    assert version == TESTED


def test_the_base_image_is_pinned_by_a_digest_that_the_builder_gives() -> None:
    assert re.findall(r"^FROM (.*)$", DOCKERFILE, re.MULTILINE) == [
        "vllm/vllm-openai:v${VLLM_VERSION}@${VLLM_DIGEST}"
    ]
    assert re.search(r"^ARG VLLM_DIGEST$", DOCKERFILE, re.MULTILINE), "a default would be a guess"
