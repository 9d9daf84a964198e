"""The oracles of the planner draw as many cases as docs and profiles promise."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any
from unittest import mock

import pytest
from hypothesis import settings

from unit.planning import test_canonical_oracle, test_oracle

ORACLES: dict[str, Any] = {
    "bytes": test_oracle.test_every_destination_byte_is_the_right_one_or_untouched,
    "unlike blocks": test_oracle.test_blocks_of_sizes_that_have_little_in_common_move_like_any_others,
    "indices": test_oracle.test_indices_and_tally_tell_of_the_same_descriptors_as_addresses_do,
    "chunks": test_canonical_oracle.test_what_some_engines_store_another_loads,
    "canonical form": test_canonical_oracle.test_engines_of_one_model_agree_on_the_canonical_form,
}
LEAST = {
    "deep": dict.fromkeys(ORACLES, 2000),  # `make test-long`
    "ci": {"bytes": 2000, "unlike blocks": 80, "indices": 400, "chunks": 400, "canonical form": 200},
}


def examples() -> dict[str, int]:
    """Examples of each oracle under the profile of this process."""
    return {name: oracle._hypothesis_internal_use_settings.max_examples for name, oracle in ORACLES.items()}


@pytest.mark.parametrize("profile", LEAST)
def test_a_profile_draws_no_fewer_cases(profile: str) -> None:
    code = (
        "import json, unit.planning.conftest; from unit.planning.test_examples import examples; "
        "print(json.dumps(examples()))"
    )
    found = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "HYPOTHESIS_PROFILE": profile, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert found.returncode == 0, found.stderr
    counts = json.loads(found.stdout)
    assert not {name: counts[name] for name, least in LEAST[profile].items() if counts[name] < least}


@pytest.mark.parametrize(("oracle", "module"), [("bytes", test_oracle), ("chunks", test_canonical_oracle)])
def test_an_oracle_checks_every_case_that_its_settings_ask_for(oracle: str, module: Any) -> None:
    test = ORACLES[oracle]
    few = settings(test._hypothesis_internal_use_settings, max_examples=60)
    with (
        mock.patch.object(test, "_hypothesis_internal_use_settings", few),
        mock.patch.object(module, "check_bytes") as check,
    ):
        test()
    assert check.call_count >= 60
