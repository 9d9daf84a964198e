"""Request ids in the scheduler. vLLM extends the ids that its callers gave."""

from __future__ import annotations

import re


def external_id(request_id: str) -> str:
    """Return a request's id without the suffix that vLLM appends (a hyphen and eight random hex digits)."""
    return re.sub(r"-[0-9a-f]{8}$", "", request_id)


def parent_of(request_id: str) -> str | None:
    """Return the id that all samples of one prompt share (``n`` above 1); None for any other request."""
    # The number of the sample, an underscore, and the shared id, which ends with eight random digits.
    found = re.fullmatch(r"\d+_(.*-[0-9a-f]{8})", request_id, re.DOTALL)
    return None if found is None else found.group(1)
