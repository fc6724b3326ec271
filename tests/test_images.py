# SPDX-License-Identifier: BSD-3-Clause
"""The committed diagrams are what their scripts draw."""

import functools
import runpy
from pathlib import Path
from unittest import mock
from xml.etree import ElementTree

import drawing
import pytest
from matplotlib.font_manager import FontProperties
from matplotlib.textpath import text_to_path

SCRIPTS = sorted([*drawing.IMAGES.glob("chapter_*.py"), drawing.IMAGES / "course.py"])


@functools.cache
def drawn_by(script: Path) -> dict[str, str]:
    """{file: text} of the diagrams that a script would write."""
    found = {}
    with mock.patch.object(drawing.Drawing, "save", lambda self, name: found.update({f"{name}.svg": self.svg()})):
        runpy.run_path(str(script), run_name="__main__")
    return found


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_a_script_draws_what_is_committed(script):
    assert drawn_by(script)
    for name, text in drawn_by(script).items():
        # No diff of two long lines, which pytest would take minutes for
        same = (drawing.IMAGES / name).read_text() == text
        assert same, f"python images/{script.name} draws another {name}"


def test_every_diagram_has_a_script():
    drawn = [name for script in SCRIPTS for name in drawn_by(script)]
    assert sorted(drawn) == sorted(path.name for path in drawing.IMAGES.glob("*.svg"))


def outside(svg: str) -> list[str]:
    """The texts of a diagram that leave its frame, in the widest of its fonts."""
    root = ElementTree.fromstring(svg)
    _, _, width, height = map(float, root.attrib["viewBox"].split())
    found = []
    for text in root.iter("{http://www.w3.org/2000/svg}text"):
        x, y, size = (float(text.attrib[name]) for name in ("x", "y", "font-size"))
        font = FontProperties(family="DejaVu Sans", size=size, weight=text.attrib.get("font-weight", "normal"))
        wide, _, _ = text_to_path.get_text_width_height_descent(text.text, font, ismath=False)
        left = x - wide * {"start": 0, "middle": 0.5, "end": 1}[text.attrib["text-anchor"]]
        if left < 0 or left + wide > width or y < size * 0.7 or y > height:
            found.append(text.text)
    return found


@pytest.mark.parametrize("path", sorted(drawing.IMAGES.glob("*.svg")), ids=lambda path: path.stem)
def test_no_text_leaves_its_frame(path):
    assert outside(path.read_text()) == []


@pytest.mark.parametrize("where", [(-1, 20, "start"), (190, 20, "start"), (100, 101, "start"), (5, 20, "middle")])
def test_a_text_that_leaves_its_frame_is_seen(where):
    diagram = drawing.Drawing(200, 100, "too small")
    diagram.text(*where[:2], "too long", anchor=where[2])
    assert outside(diagram.svg()) == ["too long"]
