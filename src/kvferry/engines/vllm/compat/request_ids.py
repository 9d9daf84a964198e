"""A request's id in the scheduler: vLLM adds to the id that its callers gave."""

from __future__ import annotations

import re


def external_id(request_id: str) -> str:
    """A request's id as vLLM's callers know it: the scheduler's ends with eight random digits."""
    return re.sub(r"-[0-9a-f]{8}$", "", request_id)


def parent_of(request_id: str) -> str | None:
    """The id that samples of one prompt (``n`` above 1) share; None of a request that is no such sample.

    vLLM puts a number before the id of the whole, which ends with eight random digits.
    """
    found = re.fullmatch(r"\d+_(.*-[0-9a-f]{8})", request_id, re.DOTALL)
    return None if found is None else found.group(1)
