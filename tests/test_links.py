# SPDX-License-Identifier: BSD-3-Clause
"""Every link of the READMEs, of docs/, the glossary and the notebooks leads somewhere: to a file, to a heading, or to an https address.

What is behind an address on the web is not asked: these tests need no network.
"""

import re
from itertools import pairwise
from urllib.parse import unquote, urlsplit

import pytest
from markdown_it import MarkdownIt

from notebooks import FOLDER, PATHS, read

ROOT = FOLDER.parent
PAGES = [
    *(*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")),
    *(ROOT / "source_code" / "proofs" / "README.md", FOLDER / "glossary.md", *PATHS),
]


def markdown(page) -> str:
    if page.suffix == ".md":
        return page.read_text()
    return "\n\n".join(cell.source for cell in read(page).cells if cell.cell_type == "markdown")


def tokens(page) -> list:
    """All of a page's, those inside a line of text included."""
    blocks = MarkdownIt().enable("table").parse(markdown(page))
    return [token for block in blocks for token in [block, *(block.children or ())]]


def headings(page) -> set[str]:
    """The anchors of a page, as GitHub makes them."""
    every = tokens(page)
    texts = [after.content for before, after in pairwise(every) if before.type == "heading_open"]
    return {re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-") for text in texts}


def links(page) -> list[str]:
    every = tokens(page)
    inside_html = re.findall(r"""(?:href|src)=["']([^"']+)""", "".join(t.content for t in every if "html" in t.type))
    return [
        *(t.attrs.get("href") or t.attrs.get("src") for t in every if t.type in ("link_open", "image")),
        *inside_html,
    ]


def dead(page) -> list[str]:
    """The links of a page that lead nowhere."""
    found = []
    for link in links(page):
        scheme, host, path, _, anchor = urlsplit(link)
        target = (page.parent / unquote(path)).resolve() if path else page
        if scheme or host:
            alive = scheme == "https" and "." in host
        else:
            alive = target.exists() and (not anchor or anchor in headings(target))
        if not alive:
            found.append(link)
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: f"{page.parent.name}/{page.stem}")
def test_every_link_leads_somewhere(page):
    assert links(page) or page.suffix == ".md"  # else the search is broken
    assert dead(page) == []


def test_a_dead_link_is_found(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        "# Two words, here\n\n[a](#two-words-here) [b](#elsewhere) [c](page.md) [d](no.md) ![e](no.svg)\n\n"
        "| f |\n|---|\n| [f](http://example.org) [g](https://example.org) |\n\n<img src='gone.png'>"
    )
    assert dead(page) == ["#elsewhere", "no.md", "no.svg", "http://example.org", "gone.png"]
