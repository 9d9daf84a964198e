"""Prompts with an image, handed over and stored; another image, under the same tokens, gets none of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from support.vision import IMAGE_TOKENS, paligemma, with_weights
from support.vllm_engine.inside import distance
from support.vllm_engine.pair import SOON, connector, prompt
from support.vllm_engine.process import Engine

pytestmark = [pytest.mark.engine, pytest.mark.long]

TEXT = prompt(500, 51)
CAT, DOG = 1, 2
MORE = IMAGE_TOKENS + 2
"""Tokens that the model's processor puts around a text: the image, a first token and a newline."""


@dataclass(frozen=True)
class Two:
    """Two engines; the first has tiers."""

    first: Engine
    second: Engine

    def alone(self, image: int) -> dict[str, Any]:
        """What the second engine says from nothing cached."""
        assert self.second.call("reset_prefix_cache")
        (answer,) = self.second.call("generate", [TEXT], image=image)
        assert self.second.call("reset_prefix_cache")
        self.second.call("new_loads")
        return answer


@pytest.fixture(scope="module")
def two(running: Any, checkpoints: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Two]:
    running.close()
    folder = tmp_path_factory.mktemp("images")
    model = str(with_weights(paligemma(folder / "model", checkpoints)))
    tiers = [
        {"type": "host", "capacity": "64MiB"},
        {"type": "file", "path": str(folder), "capacity": "256MiB"},
    ]
    settings = ({"tiers": tiers, "transfer": True, "chunk_tokens": 128}, {})
    engines = [
        Engine(folder / f"{number}.log", model=model, kv_transfer_config=connector(**own))
        for number, own in enumerate(settings)
    ]
    try:
        for engine in engines:
            engine.ready()
        yield Two(*engines)
    finally:
        for engine in engines:
            engine.close()


def test_a_prompt_with_an_image_is_stored_and_another_image_misses(two: Two) -> None:
    reference = two.alone(CAT)
    two.first.call("generate", [TEXT], image=CAT)
    two.first.call("settle_tiers")
    for image, loads in ((CAT, [("tiers", 0, len(TEXT) + MORE)]), (DOG, [])):
        assert two.first.call("reset_prefix_cache")
        two.first.call("forget_host_memory")
        two.first.call("new_loads")
        (answer,) = two.first.call("generate", [TEXT], image=image)
        assert two.first.call("new_loads") == loads
        assert (distance(answer, reference) < 1e-4) == (image == CAT)
        two.first.call("settle_tiers")


def test_a_prompt_with_an_image_is_handed_over_and_another_image_is_computed(two: Two) -> None:
    """Last: the lease that the other image does not get stays for a while."""
    references = {image: two.alone(image) for image in (CAT, DOG)}
    assert distance(references[CAT], references[DOG]) > 1e-2, "the answer does not depend on the image"
    for image, loads in ((CAT, [("peer", 0, len(TEXT) + MORE - 1)]), (DOG, [])):
        (offer,) = two.first.call("prefill", [TEXT], image=CAT)
        (answer,) = two.second.call("generate", [TEXT], [offer["params"]], image=image)
        assert two.second.call("new_loads") == loads
        assert answer["tokens"] == references[image]["tokens"]
        assert distance(answer, references[image]) < 1e-4
        two.first.call("step", SOON)
        assert two.second.call("reset_prefix_cache")
