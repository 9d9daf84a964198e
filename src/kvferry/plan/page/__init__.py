"""A picture of a forecast: one HTML file that needs nothing else.

- `strips`: which memory of a rank one block is kept in.
- `runs`: which bytes of it go where.
- `draw`: both as SVG.
- `document`: the file.
"""

from kvferry.plan.page.document import picture

__all__ = ["picture"]
