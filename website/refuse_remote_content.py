"""Hook of mkdocs: fail the build if a page loads something from another host."""

from __future__ import annotations

import re

from mkdocs.exceptions import PluginError

REMOTE = re.compile(
    r"<(?:script|img|iframe|source|audio|video|embed|input)\b[^>]*\bsrc=[\"']?(?:https?:)?//[^\s\"'>]+"
    r"|<link\b(?![^>]*rel=[\"']?canonical)[^>]*\bhref=[\"']?(?:https?:)?//[^\s\"'>]+"
    r"|<(?:object)\b[^>]*\bdata=[\"']?(?:https?:)?//[^\s\"'>]+"
    r"|(?:@import|url\()\s*[\"']?(?:https?:)?//[^\s\"')]+",
    re.IGNORECASE,
)
"""Markup that makes a browser load a script, style, font or picture from another host. Plain links do not."""


def on_post_page(output: str, *, page: object, **_: object) -> str:
    """Return a page's HTML unchanged.

    Raises:
        PluginError: the page loads content from another host.
    """
    found = REMOTE.search(output)
    if found:
        message = f"{page} loads {found[0]}; keep what a page needs in website/ or docs/"
        raise PluginError(message)
    return output
