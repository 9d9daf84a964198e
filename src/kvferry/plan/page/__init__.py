"""A picture of a forecast: one HTML file that needs nothing else.

- `strips`: the memory of a rank that holds one block.
- `runs`: the copies between strips of both sides.
- `draw`: strips and runs as SVG.
- `document`: the HTML file.
"""

from kvferry.plan.page.document import picture

__all__ = ["picture"]
