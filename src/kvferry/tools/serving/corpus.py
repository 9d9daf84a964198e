"""English text that is part of every Python installation: the language reference in `pydoc_data.topics`.

The demo, the tests and the tokenizer of the tiny checkpoints need real text, and get it here without a
download. The text differs slightly between Python versions; `corpus_digest` identifies it.
"""

from __future__ import annotations

import hashlib
import pydoc_data.topics
from collections.abc import Iterator
from functools import cache

from kvferry.errors import ConfigError


@cache
def corpus() -> str:
    """Return the Python language reference as one English text of about 400,000 characters."""
    topics: dict[str, str] = pydoc_data.topics.topics
    return "\n\n".join(topics[name].strip() for name in sorted(topics))


@cache
def corpus_digest() -> str:
    """Return the SHA-256, in hex, of the text that `corpus` returns."""
    return hashlib.sha256(corpus().encode()).hexdigest()


def passages(characters: int) -> Iterator[str]:
    """Yield passages of the text that `corpus` returns, in order, without overlap, each from a paragraph on.

    Raises:
        ConfigError: `characters` is not positive, or the text is shorter than one passage.
    """
    text = corpus()
    if not 0 < characters <= len(text):
        message = f"a passage of {characters} characters was asked for; the text has {len(text)}"
        raise ConfigError(message)
    start = 0
    while start + characters <= len(text):
        yield text[start : start + characters]
        # A passage that begins within a sentence reads oddly in the demo.
        paragraph = text.find("\n\n", start + characters)
        if paragraph < 0:
            return
        start = paragraph + 2
