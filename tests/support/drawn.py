"""Plugin of pytest that prints a digest of the examples that each property draws: `-p support.drawn`.

Two runs that print the same have tested the same.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict

from hypothesis.internal import observability

_digests = defaultdict(hashlib.blake2b)


def _note(observation: observability.Observation) -> None:
    if observation.type == "test_case":
        _digests[observation.property].update(observation.representation.encode())


def pytest_configure() -> None:
    observability.OBSERVABILITY_COLLECT_COVERAGE = False  # traces every line otherwise
    observability.add_observability_callback(_note)


def pytest_sessionfinish() -> None:
    for name, digest in sorted(_digests.items()):
        print(f"\ndrawn {name.rpartition('::')[2]} {digest.hexdigest()[:16]}")
