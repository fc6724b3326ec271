# SPDX-License-Identifier: BSD-3-Clause
"""The chapters, as the first cell of each notebook tells them, and the map of the course drawn from that.

README.md's table of chapters is made from the same: python images/readme.py writes both.
"""

import json
import re
from dataclasses import dataclass
from textwrap import wrap

from drawing import COLOURS, IMAGES, PAPER, Drawing
from labkit.teaching import claims

LINE = COLOURS["parameters"]
LAWS = {  # what to remember of each chapter, in a few words; its notebook has the conditions
    "00": "peaks follow from arithmetic, to the byte",
    "01": "DDP divides the work, not the memory",
    "02": "an all-reduce is a reduce-scatter, then an all-gather",
    "03": "ZeRO is three changes to DDP",
    "04": claims.LAWS["04"],
    "05": "only the units in use are whole",
    "06": "offload takes off the peak what you can calculate",
    "07": "saved by 4 ranks, continued on 2 or 3",
    "08": claims.LAWS["08"],
    "09": "a parameter is a DTensor; you set when it is whole",
    "10": "count the bytes that leave a node",
    "11": "predicted, simulated and measured agree",
    "12": "call early and wait late: that hides communication",
    "13": "a stage of ZeRO says what is split",
    "14": "in JAX, a compiler writes the collectives",
    "15": "one sequence's activations need more than FSDP",
    "16": "what ranks leave behind names most faults",
    "17": "your model peaks where its config.json says",
    "18": f"{claims.LAWS['18']}: let each have an owner",
    "19": "send tokens to experts, not experts to tokens",
    "20": "split the sequence: only attention communicates",
    "21": "most sentences about FSDP hold under a condition",
}
ROWS = {
    "one small network": range(4),
    "": range(4, 8),
    "a transformer": range(8, 12),
    " ": range(12, 16),
    "  ": range(16, 22),
}


DAYS = {"first": ("00", "01", "04", "05", "07"), "second": ("08", "09", "10")}  # of a class
FAST_LANE = ("00", "01", "04", "05", "06", "07")  # chapter 00 names it at its end


@dataclass
class Chapter:
    number: str  # "05"
    name: str  # "05_auto_wrap"
    title: str  # "Auto wrap", without what follows a colon
    minutes: int  # to read and run it
    exercises: int  # minutes for these

    def law(self) -> str:
        return LAWS[self.number]


def chapters() -> list[Chapter]:
    """All chapters, in order."""
    return [_chapter(path) for path in sorted((IMAGES.parent / "notebooks").glob("*.ipynb"))]


def _chapter(path) -> Chapter:
    head = "".join(json.loads(path.read_text())["cells"][0]["source"])
    (title,) = re.findall(r"^# \d+ · ([^:\n]+)", head)
    ((minutes, exercises),) = re.findall(r"^(\d+) minutes, and (\d+) for the exercises", head, re.M)
    return Chapter(path.stem[:2], path.stem, title, int(minutes), int(exercises))


def table() -> str:
    """The chapters as README.md lists them."""
    rows = []
    for each in chapters():
        link = f"[{each.number} · {each.title}](notebooks/{each.name}.ipynb)"
        name = f"**{link}**" if each.number in FAST_LANE else link
        rows.append(f"| {name} | {each.law()} | {each.minutes} + {each.exercises} |")
    return "\n".join(["| chapter | what it tests | minutes |", "|---|---|--:|", *rows])


def day(name: str) -> str:
    """A day of a class, as docs/instructor.md lists it."""
    found = [each for each in chapters() if each.number in DAYS[name]]
    rows = [
        f"| [{each.number} · {each.title}](../notebooks/{each.name}.ipynb) | {each.minutes} | {each.exercises} |"
        for each in found
    ]
    minutes = sum(each.minutes + each.exercises for each in found)
    end = f"| in all, without breaks: {minutes // 60} h {minutes % 60:02} min | | |"
    return "\n".join(["| chapter | read and run, minutes | exercises, minutes |", "|---|--:|--:|", *rows, end])


def course_map() -> Drawing:
    """The chapters as stations of one line, in rows."""
    found = chapters()
    rows = [([found[number] for number in places], name.strip()) for name, places in ROWS.items()]
    tops, bottom = [], 16
    for stations, _ in rows:
        tops.append(bottom)
        bottom += 120 + 16.2 * max(_lines(each, len(stations)) for each in stations)
    drawing = Drawing(1000, round(bottom), "The map of the course: its chapters as stations of one line")
    for top, (stations, name) in zip(tops, rows, strict=True):
        y, step = top + 42, 1000 / len(stations)
        drawing.line(step / 2, y, 1000 - step / 2, y, LINE, 6)
        if name:
            drawing.text(14, y - 34, name, 15, colour=LINE, bold=True)
        for place, chapter in enumerate(stations):
            _station(drawing, chapter, (place + 0.5) * step, y, len(stations))
    return drawing


def _words(chapter: Chapter, stations: int) -> tuple[list[str], list[str]]:
    """Return the lines of a station's title and of its law, for a row with this number of stations."""
    step = 1000 / stations
    return wrap(chapter.title, int(step / 9.4)), wrap(chapter.law(), int(step / 7.6))


def _lines(chapter: Chapter, stations: int) -> int:
    return sum(map(len, _words(chapter, stations)))


def _station(drawing, chapter, x, y, stations):
    drawing.box(x - 21, y - 17, 42, 34, PAPER, LINE, chapter.number, 16, bold=True)
    title, law = _words(chapter, stations)
    drawing.text(x, y + 38, "\n".join(title), 15, "middle", bold=True)
    drawing.text(x, y + 39 + 18 * len(title), "\n".join(law), 13.5, "middle")


if __name__ == "__main__":
    course_map().save("course_map")
