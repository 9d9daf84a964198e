"""The demo: real text through a prefill and a decode engine, compared with a single engine.

- `text`: the prompts; `client`: streaming completions; `transfers`: what moved, from the decode engine's log.
- `verdict`: comparison with a single engine; `pair`: all of that for one model.
- `screen`, `report`: output during and after the run.
"""

from __future__ import annotations

from kvferry.serving.demo.pair import DemoModel, family_model, measure
from kvferry.serving.demo.screen import Screen
from kvferry.serving.demo.verdict import AnswerVerdict

__all__ = ["AnswerVerdict", "DemoModel", "Screen", "family_model", "measure"]
