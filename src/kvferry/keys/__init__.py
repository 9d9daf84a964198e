"""Names for content: the same in every process, restart, Python version and node."""

from kvferry.keys.prompt import prompt_digest

__all__ = ["prompt_digest"]
