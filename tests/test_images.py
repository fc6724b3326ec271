"""The committed diagrams are what their scripts draw."""

import functools
import runpy
from pathlib import Path
from unittest import mock

import drawing
import pytest

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
