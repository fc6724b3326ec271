"""The chapters, as the first cell of each notebook tells them, and the map of the course drawn from that.

README.md's table of chapters is made from the same: python images/readme.py writes both.
"""

import json
import re
from dataclasses import dataclass
from textwrap import wrap

from drawing import COLOURS, IMAGES, PAPER, Drawing

LINE = COLOURS["parameters"]
LAWS = {  # what to remember of each chapter, in a few words; its notebook has the conditions
    "00": "peaks follow from arithmetic, to the byte",
    "01": "DDP divides the work, not the memory",
    "02": "an all-reduce is a reduce-scatter, then an all-gather",
    "03": "ZeRO is three changes to DDP",
    "04": "one unit shards what is kept between steps",
    "05": "only the units in use are whole",
    "06": "offload takes off the peak what you can calculate",
    "07": "saved by 4 ranks, continued on 2 or 3",
    "08": "after sharding, activations are the peak",
    "09": "a parameter is a DTensor; you set when it is whole",
    "10": "count the bytes that leave a node",
    "11": "predicted, simulated and measured agree",
    "12": "call early and wait late: that hides communication",
    "13": "a stage of ZeRO says what is split",
    "14": "in JAX, a compiler writes the collectives",
    "15": "one sequence's activations need more than FSDP",
    "16": "what ranks leave behind names most faults",
    "17": "your model peaks where its config.json says",
    "18": "Muon needs whole matrices: let each have an owner",
}
ROWS = {
    "one small network": range(4),
    "": range(4, 8),
    "a transformer": range(8, 12),
    " ": range(12, 16),
    "  ": range(16, 19),
}


@dataclass
class Chapter:
    number: str  # "05"
    name: str  # "05_auto_wrap"
    title: str  # "Auto wrap", without what follows a colon
    claim: str  # the first sentence of the claim, without its full stop, in Markdown

    def law(self) -> str:
        return LAWS[self.number]


def chapters() -> list[Chapter]:
    """All chapters, in order."""
    return [_chapter(path) for path in sorted((IMAGES.parent / "notebooks").glob("*.ipynb"))]


def _chapter(path) -> Chapter:
    head = "".join(json.loads(path.read_text())["cells"][0]["source"])
    (title,) = re.findall(r"^# \d+ · ([^:\n]+)", head)
    (claim,) = [" ".join(text.split()) for text in head.split("\n\n") if text.startswith("**The claim")]
    claim = claim.replace("**", "").split(": ", 1)[1]  # "The claim put to the proof: …"
    first = re.split(r"(?<=\.) (?=[A-Z]|bf16)", claim)[0]
    return Chapter(path.stem[:2], path.stem, title, first.removesuffix("."))


def table() -> str:
    """The chapters as README.md lists them."""
    rows = [f"| [`{each.name}`](notebooks/{each.name}.ipynb) | {each.claim} |" for each in chapters()]
    return "\n".join(["| notebook | the claim it puts to the proof |", "|---|---|", *rows])


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
