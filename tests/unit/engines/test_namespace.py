"""Chunks of pages whose content is not known are for the release of vLLM and the device that wrote them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from kvferry.connector.content import CACHE_DTYPE, MODEL_DTYPE, WEIGHTS
from kvferry.engines.vllm import identity
from kvferry.geometry import PageFormat, opaque_page
from kvferry.geometry.canonical import canonical_form_of
from support.pages import kv_page, rank_of

FACTS = {WEIGHTS: "0123abcd", MODEL_DTYPE: "bfloat16", CACHE_DTYPE: "fp8_ds_mla"}
CONFIG = SimpleNamespace(
    model_config=SimpleNamespace(served_model_name="tiny", model="tiny"),
    cache_config=SimpleNamespace(),
    speculative_config=None,
)


def digest_of(page: PageFormat) -> str:
    return identity.namespace_of(CONFIG, FACTS, canonical_form_of([rank_of(page)], 64)).digest


@pytest.mark.parametrize(
    ("asked", "answer"),
    [("vllm_version", "0.99.0"), ("kind_of_device", "cuda 9.0")],
    ids=["release", "device"],
)
@pytest.mark.parametrize(
    ("page", "shared"),
    [(kv_page(), True), (opaque_page("riddle", 16, 64, 0, 1), False)],
    ids=["known", "whole"],
)
def test_who_wrote_whole_pages_is_part_of_their_namespace(
    page: PageFormat, shared: bool, asked: str, answer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = digest_of(page)
    monkeypatch.setattr(identity, asked, lambda: answer)
    assert (digest_of(page) == here) is shared
