# SPDX-License-Identifier: BSD-3-Clause
"""The glossary sends a reader to the chapter that explains a term, and each term has one line."""

import re

import pytest

from notebooks import FOLDER, PATHS, read

ROW = re.compile(
    r"^\| (?P<term>[^|]+) \| (?P<meaning>[^|]+) \| \[(?P<chapter>\d\d)\]\((?P<file>[^)]+)\) \|$", re.MULTILINE
)
ROWS = [row.groupdict() for row in ROW.finditer((FOLDER / "glossary.md").read_text())]


def prose(path) -> str:
    """A chapter's markdown on one line, without its code, alternative texts and references."""
    cells = [cell.source for cell in read(path).cells if cell.cell_type == "markdown"]
    text = "\n\n".join(cells).partition("## References")[0]
    return " ".join(re.sub(r"```.*?```|!\[[^\]]*\]", "", text, flags=re.DOTALL).split())


CHAPTERS = {path.stem[:2]: prose(path) for path in PATHS}


def forms(term: str) -> str:
    """A pattern of the term in singular and plural, and of "unsharded" and "resharding" for unshard and reshard."""
    return rf"\b{re.escape(term)}(?:s|es|ed|ing|d)?\b"


def emphasised(term: str) -> str:
    """A pattern of the term in italics or bold, as a chapter writes it where it says what it is."""
    return rf"(?<![*\w])\*{{1,2}}{re.escape(term)}\*{{1,2}}(?![*\w])"


def wrong(row: dict, chapters: dict[str, str]) -> str:
    """What is wrong with a row: "" if nothing."""
    term, number = row["term"], row["chapter"]
    if not re.search(forms(term), chapters[number], re.IGNORECASE):
        return f"chapter {number} does not use {term!r}"
    earlier = [each for each in sorted(chapters) if each < number]
    found = [each for each in earlier if re.search(emphasised(term), chapters[each], re.IGNORECASE)]
    return f"{term!r} is explained in chapter {found[0]} already" if found else ""


def test_the_rows_are_in_order_and_each_term_has_one():
    terms = [row["term"].casefold() for row in ROWS]
    assert len(ROWS) >= 50
    assert terms == sorted(set(terms))
    assert len(ROWS) == (FOLDER / "glossary.md").read_text().count("\n| ") - 1  # every line of the table is read


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["term"])
def test_the_chapter_named_uses_the_term_and_none_explains_it_before(row):
    assert row["file"].startswith(row["chapter"]) and (FOLDER / row["file"]).exists()
    assert wrong(row, CHAPTERS) == ""


def test_a_wrong_chapter_is_found():
    chapters = {"00": "A rank. A *shard* is a slice.", "01": "Two shards."}
    assert wrong({"term": "rank", "chapter": "01"}, chapters) == "chapter 01 does not use 'rank'"
    assert wrong({"term": "shard", "chapter": "01"}, chapters) == "'shard' is explained in chapter 00 already"
    assert wrong({"term": "shard", "chapter": "00"}, chapters) == ""
