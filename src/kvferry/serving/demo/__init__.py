"""The demo: ask a prefill and a decode engine, and compare their answers with a single engine's.

- `text`: the prompts; `client`: streaming completions; `transfers`: KV loads, from the decode engine's log.
- `verdict`: comparison with a single engine's answer; `pair`: the whole run for one model.
- `screen`: output during the run; `report`: the result table.
"""

from __future__ import annotations

from kvferry.serving.demo.pair import DemoModel, chat_model, family_model, measure
from kvferry.serving.demo.screen import Screen
from kvferry.serving.demo.verdict import AnswerVerdict

__all__ = ["AnswerVerdict", "DemoModel", "Screen", "chat_model", "family_model", "measure"]
