"""The demo: ask a prefill and a decode engine, and compare their answers with a single engine's."""

from __future__ import annotations

from kvferry.tools.serving.demo.pair import DemoModel, chat_model, family_model, measure
from kvferry.tools.serving.demo.report import AnswerVerdict, Screen

__all__ = ["AnswerVerdict", "DemoModel", "Screen", "chat_model", "family_model", "measure"]
