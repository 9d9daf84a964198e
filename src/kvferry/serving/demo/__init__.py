"""The demo: real text through a prefill and a decode engine, beside what one engine answers.

- `text`: what is asked; `client`: asking, streamed; `transfers`: what moved, as the decode engine logged it.
- `verdict`: whether the answer is the one that a single engine gives; `pair`: all of that for one model.
- `screen`, `report`: what a person sees meanwhile and at the end.
"""

from __future__ import annotations

from kvferry.serving.demo.pair import DemoModel, family_model, measure
from kvferry.serving.demo.screen import Screen
from kvferry.serving.demo.verdict import Verdict

__all__ = ["DemoModel", "Screen", "Verdict", "family_model", "measure"]
