"""A picture of a handover forecast, as one self-contained HTML file.

`scene` collects what one picture shows. `draw` lists the pieces of memory and the copies between them, and
draws them as SVG. `document` writes the HTML file.
"""

from kvferry.tools.plan.page.document import picture

__all__ = ["picture"]
