"""kvferry moves the KV cache of hybrid language models between engines and storage."""

from __future__ import annotations

__all__ = ["__version__"]

__version__ = "0.1.0"
