"""Facts of an engine, for tests that have none."""

from __future__ import annotations

from typing import Any

from kvferry.connector.engine import CacheGroup, EngineFacts
from kvferry.geometry import GroupKind

FULL_GROUP = CacheGroup(kind=GroupKind.FULL, attention_span=0, block_tokens=16)


def made_up(**facts: Any) -> EngineFacts:
    """An engine with one group of full attention, but for these facts."""
    return EngineFacts(
        **{
            "engine_id": "e",
            "groups": (FULL_GROUP,),
            "num_blocks": 1000,
            "longest_request": 4096,
            "steps_in_flight": 1,
            "tokens_in_flight": 256,
            "step_tokens": 256,
            "draft_lookahead": 0,
            "speculates": False,
            "reuses_prompts_only": False,
            "has_rings": False,
            "port_offset": 0,
            "parent_of": lambda _: None,
            **facts,
        }
    )
