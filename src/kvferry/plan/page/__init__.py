"""A picture of a handover forecast, as one self-contained HTML file.

- `strips`: lists the contiguous pieces of memory (*strips*) that hold a block on one rank.
- `runs`: computes the copies between the strips of both sides.
- `place`: maps memory addresses to positions in the picture.
- `scene`: collects everything that one picture shows.
- `draw`: draws strips and copies as SVG.
- `document`: writes the HTML file.
"""

from kvferry.plan.page.document import picture

__all__ = ["picture"]
