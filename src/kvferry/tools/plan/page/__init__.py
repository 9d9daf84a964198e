"""A picture of a handover forecast, as one self-contained HTML file.

`strips` lists the pieces of memory that hold a block on one rank, `runs` the copies between those of both
sides. `place` maps addresses to positions, `scene` collects what one picture shows, `draw` draws it as SVG,
and `document` writes the HTML file.
"""

from kvferry.tools.plan.page.document import picture

__all__ = ["picture"]
