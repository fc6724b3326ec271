# SPDX-License-Identifier: BSD-3-Clause
"""The little that the course's diagrams need to be drawn as SVG, in the colours of its plots.

A diagram brings its own light background, so that it reads the same on a white page and on a black one, and
its text is text. Positions and sizes are in pixels, from the upper left.
"""

import sys
from pathlib import Path
from xml.sax.saxutils import escape

IMAGES = Path(__file__).resolve().parent
sys.path.insert(0, str(IMAGES.parent / "source_code"))

from labkit.teaching.plots import COLOURS  # noqa: E402  (for the diagrams: a category has the same colour everywhere)

INK, SOFT, PAPER = "#222222", "#777777", "#fbfbf8"
# The four tones of what a unit goes through in a step
GATHER, COMPUTE, FREE, REDUCE = COLOURS["all-gather"], COLOURS["activations"], "#ffffff", COLOURS["reduce-scatter"]


class Drawing:
    """Shapes in the order they are drawn; ``save`` writes them."""

    def __init__(self, width: int, height: int, title: str):
        self.width, self.height, self.title = width, height, title
        self.parts = []

    def box(self, x, y, width, height, fill="none", edge=INK, text="", size=15, colour=None, dash="", bold=False):
        """A rectangle, its text in the middle; lines of text are separated by newlines."""
        dashed = f' stroke-dasharray="{dash}"' if dash else ""
        self.parts.append(
            f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="3" fill="{fill}" stroke="{edge}"{dashed}/>'
        )
        if text:
            colour = colour or (PAPER if _dark(fill) else INK)
            lines = text.count("\n")
            self.text(x + width / 2, y + height / 2 + size * (0.36 - 0.6 * lines), text, size, "middle", colour, bold)

    def text(self, x, y, text, size=15, anchor="start", colour=INK, bold=False):
        """Text with its baseline at y, further lines below; anchor: start, middle or end."""
        weight = ' font-weight="bold"' if bold else ""
        for number, line in enumerate(text.split("\n")):
            self.parts.append(
                f'<text x="{x}" y="{y + 1.2 * size * number:.1f}" font-size="{size}" text-anchor="{anchor}" '
                f'fill="{colour}"{weight}>{escape(line)}</text>'
            )

    def line(self, x1, y1, x2, y2, colour=INK, width=1.5, arrow=False, dash=""):
        """A line, with an arrow's head at its end if wanted."""
        head = ' marker-end="url(#head)"' if arrow else ""
        dashed = f' stroke-dasharray="{dash}"' if dash else ""
        self.parts.append(
            f'<line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}" stroke="{colour}" stroke-width="{width}"{head}{dashed}/>'
        )

    def save(self, name: str):
        """Write images/NAME.svg."""
        (IMAGES / f"{name}.svg").write_text(self.svg())

    def svg(self) -> str:
        """The drawing as a file's text."""
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {self.height}" width="{self.width}" '
            f'height="{self.height}" font-family="Helvetica, Arial, DejaVu Sans, sans-serif" role="img">\n'
            f"<title>{escape(self.title)}</title>\n"
            '<defs><marker id="head" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" markerHeight="7" '
            f'orient="auto-start-reverse"><path d="M0,0 L10,5 L0,10 z" fill="{INK}"/></marker></defs>\n'
            f'<rect width="{self.width}" height="{self.height}" rx="8" fill="{PAPER}"/>\n'
            + "\n".join(self.parts)
            + "\n</svg>\n"
        )


def _dark(fill: str) -> bool:
    if not fill.startswith("#"):
        return False
    red, green, blue = (int(fill[i : i + 2], 16) for i in (1, 3, 5))
    return 0.3 * red + 0.6 * green + 0.1 * blue < 130
