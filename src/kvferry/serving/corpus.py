"""English text that every Python installation carries: the language reference in `pydoc_data.topics`.

The demo, the tests and the tokenizer of the tiny checkpoints use it, so that nothing is downloaded and
nothing is made up. The text differs a little between Python versions; `corpus_digest` says which one this is.
"""

from __future__ import annotations

import hashlib
import pydoc_data.topics
from collections.abc import Iterator
from functools import cache

from kvferry.errors import ConfigError


@cache
def corpus() -> str:
    """All topics in the order of their names, a blank line between them: some 400,000 characters."""
    topics: dict[str, str] = pydoc_data.topics.topics
    return "\n\n".join(topics[name].strip() for name in sorted(topics))


@cache
def corpus_digest() -> str:
    """SHA-256 of `corpus`, in hex."""
    return hashlib.sha256(corpus().encode()).hexdigest()


def passages(characters: int) -> Iterator[str]:
    """Disjoint passages in the order of the text, each starting at a paragraph.

    Args:
        characters: length of each passage; every passage has exactly this many.

    Raises:
        ConfigError: at the first passage, when the whole text is shorter than one.
    """
    text = corpus()
    if not 0 < characters <= len(text):
        message = f"a passage of {characters} characters was asked for; the text has {len(text)}"
        raise ConfigError(message)
    start = 0
    while start + characters <= len(text):
        yield text[start : start + characters]
        paragraph = text.find("\n\n", start + characters)
        if paragraph < 0:
            return
        start = paragraph + 2
