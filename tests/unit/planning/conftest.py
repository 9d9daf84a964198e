"""How many examples properties try: HYPOTHESIS_PROFILE is `ci`, `fast`, `explore` or `deep`."""

import os

from hypothesis import HealthCheck, settings

SLOW = (HealthCheck.too_slow, HealthCheck.data_too_large)
settings.register_profile(
    "ci", max_examples=400, derandomize=True, deadline=None, database=None, suppress_health_check=SLOW
)
settings.register_profile("explore", max_examples=400, deadline=None, suppress_health_check=SLOW)
settings.register_profile("deep", max_examples=10_000, deadline=None, suppress_health_check=SLOW)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))
