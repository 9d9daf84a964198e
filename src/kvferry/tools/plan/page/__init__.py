"""A picture of a handover forecast, as one self-contained HTML file."""

from kvferry.tools.plan.page.document import picture

__all__ = ["picture"]
