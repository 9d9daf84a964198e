"""Images as vLLM's own processing hands them to an engine: what names them, and what does not."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from kvferry.engines.vllm.identity import _processor
from kvferry.engines.vllm.items import name_of
from kvferry.transport.messages import compare_facts
from support.vision import feature, model_config, paligemma

pytestmark = pytest.mark.slow

CAT, DOG = (
    Image.fromarray(np.random.default_rng(seed).integers(0, 255, (64, 48, 3), np.uint8)) for seed in (1, 2)
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return paligemma(tmp_path_factory.mktemp("vision"), tmp_path_factory.getbasetemp() / "tokenizers")


def test_an_identifier_that_starts_anew_with_the_engine_is_no_name(model: Path) -> None:
    config, first = model_config(model), "renderer0-mm-1-image-0"
    cat, dog = feature(config, CAT, first), feature(config, DOG, first)
    assert cat.identifier == dog.identifier, "another image under the name of the first, after a restart"
    assert name_of(cat) != name_of(dog)
    assert name_of(cat) == name_of(feature(config, CAT, "renderer0-mm-9-image-0"))
    assert name_of(cat) == name_of(feature(config, CAT))


def test_an_image_has_one_name_under_any_path_of_the_model(model: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(model, tmp_path / "copy")
    here, there = (feature(model_config(one), CAT) for one in (model, copy))
    assert here.identifier != there.identifier
    assert name_of(here) == name_of(there)


def test_processor_settings_change_names_and_are_named_in_words(model: Path) -> None:
    plain, raw = model_config(model), model_config(model, mm_processor_kwargs={"do_normalize": False})
    assert name_of(feature(plain, CAT)) != name_of(feature(raw, CAT))
    facts = [{"multimodal processor": _processor(config)} for config in (plain, raw)]
    assert compare_facts(*facts) == [
        "multimodal processor: mm_processor_kwargs.do_normalize is not set there, false here"
    ]


def test_a_different_preprocessor_configuration_is_named_by_its_key(model: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(model, tmp_path / "copy")
    path = copy / "preprocessor_config.json"
    path.write_text(path.read_text().replace("0.5", "0.25", 1))
    facts = [{"multimodal processor": _processor(model_config(one))} for one in (model, copy)]
    assert compare_facts(*facts) == [
        "multimodal processor: image_processor.image_mean is [0.5, 0.5, 0.5] there, [0.25, 0.5, 0.5] here"
    ]
