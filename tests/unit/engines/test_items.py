"""Images are named by what the processor made of them, and by nothing else."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from kvferry.common.errors import Unnameable
from kvferry.engines.vllm.items import name_of
from support.mm import feature

CAT, DOG = [1.0, 2.0], [1.0, 2.5]


def test_equal_pixels_have_equal_names_whatever_the_engine_calls_them():
    assert name_of(feature(1, CAT, "renderer0-mm-1-image-0")) == name_of(feature(9, CAT, "a" * 64))


def test_other_pixels_have_other_names_under_one_identifier():
    # Without prefix caching and processor cache, the identifier is a counter that restarts with the engine.
    assert name_of(feature(1, CAT)) != name_of(feature(1, DOG))


@pytest.mark.parametrize(
    "other",
    [
        torch.tensor(CAT, dtype=torch.float64),
        torch.tensor(CAT, dtype=torch.bfloat16),
        torch.tensor([CAT]),
        [CAT],
        np.array(CAT, np.float32).tobytes().hex(),
    ],
)
def test_the_same_bytes_in_another_form_are_other_content(other):
    data = feature(1, CAT)
    data.data["pixel_values"].data = other
    assert name_of(data) != name_of(feature(1, CAT))


def test_tensors_beside_the_pixels_change_the_name():
    grids = [name_of(feature(1, CAT, grid=torch.tensor(grid))) for grid in ([1, 2], [2, 1])]
    assert len({*grids, name_of(feature(1, CAT))}) == 3


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"grid": torch.ones(2)}, {"grids": torch.ones(2)}),
        ({"grid": [torch.ones(1), torch.ones(2)]}, {"grid": [torch.ones(1), torch.zeros(2)]}),
        ({"grid": [torch.ones(1), [torch.ones(1)]]}, {"grid": [[torch.ones(1)], torch.ones(1)]}),
        ({"grid": {"t": 1}}, {"grid": {"t": 2}}),
        ({"lengths": np.array([1, 2])}, {"lengths": np.array([1, 3])}),
        ({"lengths": np.array([1, 2])}, {"lengths": np.array([[1, 2]])}),
        ({"lengths": np.array([1, 2], "i8")}, {"lengths": np.array([1, 2], "u8")}),
        ({"scale": 0.5}, {"scale": 0.25}),
        ({"scale": 1}, {"scale": True}),
        ({"scale": None}, {"scale": "None"}),
    ],
    ids=str,
)
def test_each_value_counts_with_its_key_its_type_and_its_place(one, other):
    assert name_of(feature(1, CAT, **one)) != name_of(feature(1, CAT, **other))


def test_the_order_of_keys_does_not_count():
    a, b = torch.ones(1), torch.zeros(1)
    assert name_of(feature(1, CAT, a=a, b=b)) == name_of(feature(1, CAT, b=b, a=a))


def test_a_video_of_the_same_tensors_is_no_image():
    assert name_of(replace(feature(1, CAT), modality="video")) != name_of(feature(1, CAT))


def test_a_name_is_the_same_in_every_process_and_version():
    """Chunks of tiers are kept under it."""
    one = feature(1, CAT, grid=[np.array([1, 2], "<i4")], scale=0.5)
    assert name_of(one) == "2236a17a79c8b50fc7b0b5bd23bd2e27"


def test_bfloat16_and_lists_of_tensors_are_named():
    tall = feature(1, torch.ones(3, dtype=torch.bfloat16), grid=[torch.ones(1), torch.zeros(2)], scale=0.5)
    assert len(name_of(tall)) == 32


def test_an_item_is_digested_once():
    one = feature(1, CAT)
    first = name_of(one)
    one.data["pixel_values"].data = torch.tensor(DOG)
    assert name_of(one) == first


def test_an_item_outside_the_schedulers_process_has_no_name():
    with pytest.raises(Unnameable, match="not in the scheduler's process"):
        name_of(feature(1, None))


def test_the_address_of_an_item_in_shared_memory_is_no_name():
    with pytest.raises(Unnameable, match="mm_processor_cache_type shm"):
        name_of(feature(1, CAT, address=torch.tensor(4096)))


def test_a_value_without_bytes_has_no_name():
    with pytest.raises(Unnameable, match=r"item\.data\.more is a object"):
        name_of(feature(1, CAT, more=object()))
    with pytest.raises(Unnameable, match=r"item\.data\.more is a ndarray"):
        name_of(feature(1, CAT, more=np.array([object()])))
