# SPDX-License-Identifier: BSD-3-Clause
"""The site: it builds, its links lead somewhere, its pages open everywhere, and its planner answers as plan.py does."""

import functools
import json
import os
import random
import shlex
import subprocess
import sys
import threading
from dataclasses import fields
from html.parser import HTMLParser
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlencode, urlsplit

import course
import pytest
from conftest import SOURCE
from labkit.running.options import choices_of
from labkit.running.plan_options import Config
from test_browser import CHROMIUM, QUIET

from notebooks import PATHS

pytestmark = pytest.mark.browser
ROOT = SOURCE.parent
SITE = ROOT / "build" / "site"
PLANNER = "docs/generated/try_the_planner.html"
PHONE = {"width": 390, "height": 844}
FIRST_PAGE = 1.5e6  # bytes
CONFIGS = [
    (SOURCE / "samples" / "llama_small.json").read_text(),
    json.dumps(
        {
            "model_type": "mixtral",
            "num_hidden_layers": 8,
            "hidden_size": 1024,
            "num_attention_heads": 16,
            "num_key_value_heads": 4,
            "intermediate_size": 3584,
            "vocab_size": 32000,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
        }
    ),
]
BAD = [
    "",
    "{",
    "[1]",
    "{}",
    '{"zero_optimization": {"stage": 2}}',
    "compute_environment: LOCAL_MACHINE\ndistributed_type: FSDP",
]


@pytest.fixture(scope="module")
def built():
    """Build the site as a contributor does."""
    make = ["make", "--no-print-directory", "site", f"PYTHON={sys.executable}"]
    done = subprocess.run(make, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def address(built):
    """Serve the site. Returns its address, with a slash at its end."""

    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *words):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=SITE))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()
    server.server_close()


@pytest.fixture(scope="module")
def browser(require_all):
    if not CHROMIUM:
        (pytest.fail if require_all else pytest.skip)("chromium is not installed")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=QUIET)
        yield browser
        browser.close()


class Page(HTMLParser):
    """What the tests read of a page: its links, its anchors, its images, and the entries of its navigation."""

    def __init__(self, path: Path):
        super().__init__()
        self.path, self.links, self.anchors, self.images = path, [], set(), []
        self.feed(path.read_text())

    def handle_starttag(self, tag, attributes):
        given = dict(attributes)
        self.anchors |= {given[name] for name in ("id", "name") if given.get(name)}
        self.links += [given[name] for name in ("href", "src") if given.get(name)]
        if tag == "img":
            self.images.append(given)

    def broken(self) -> list[str]:
        """Return the links within the site that lead nowhere."""
        found = []
        for link in self.links:
            scheme, _, path, _, anchor = urlsplit(link)
            target = (self.path.parent / unquote(path)).resolve() if path else self.path
            target = target / "index.html" if target.is_dir() else target
            if scheme not in ("", "data") and scheme != "https":
                found.append(link)
            elif not scheme and not target.is_file():
                found.append(link)
            elif not scheme and anchor and target.suffix == ".html" and unquote(anchor) not in page(target).anchors:
                found.append(link)
        return found


@functools.cache
def page(path: Path) -> Page:
    return Page(path)


@functools.cache
def pages() -> list[Path]:
    return sorted(path for path in SITE.rglob("*.html") if "_static" not in path.parts)


def test_it_builds_without_a_warning(built):
    assert (ROOT / "build" / "warnings.txt").read_text() == ""
    for path in PATHS:
        assert (SITE / "_sources" / "notebooks" / path.name).read_bytes() == path.read_bytes()
        assert f"../_sources/notebooks/{path.name}" in page(SITE / "notebooks" / f"{path.stem}.html").links


def test_no_link_is_broken(built):
    assert {str(path.relative_to(SITE)): broken for path in pages() if (broken := page(path).broken())} == {}


def test_a_broken_link_is_found(tmp_path):
    path = tmp_path / "page.html"
    path.write_text(
        "<p id=here><a href='#here'>a</a><a href='#there'>b</a><img src='no.png'><a href='http://x.org'>c</a>"
    )
    assert Page(path).broken() == ["#there", "no.png", "http://x.org"]


def test_every_image_has_a_description(built):
    images = [(path.name, image) for path in pages() for image in page(path).images]
    assert len(images) > 2 * len(PATHS)
    assert [(name, i["src"]) for name, i in images if len(i.get("alt") or "") < 20 or i["alt"] in i["src"]] == []


def test_the_navigation_has_every_chapter_and_marks_the_fast_lane(built):
    text = (SITE / "index.html").read_text()
    for chapter in course.chapters():
        marked = "★ " if chapter.number in course.FAST_LANE else ""
        assert f'href="notebooks/{chapter.name}.html">{marked}{chapter.number} · {chapter.title}</a>' in text


def test_the_gallery_names_the_hardware_of_every_record(built):
    text = (SITE / "docs" / "generated" / "records.html").read_text()
    for path in (SOURCE / "results" / "reference").iterdir():
        files = list(path.glob("*.json")) if path.is_dir() else [path]
        section = text.partition(f">{path.stem}<a")[2].partition("</section>")[0]
        assert json.loads(files[0].read_text())["hardware"] in section
        assert [each.name for each in files if f"/{each.name}" not in section] == []


def test_every_page_opens_on_a_phone_with_nothing_from_elsewhere(address, browser):
    wrong = []
    context = browser.new_context(viewport=PHONE)
    tab = context.new_page()
    tab.on("console", lambda said: said.type in ("error", "warning") and wrong.append((tab.url, said.text)))
    tab.on("pageerror", lambda error: wrong.append((tab.url, str(error))))
    tab.on("request", lambda asked: asked.url.startswith((address, "data:")) or wrong.append((tab.url, asked.url)))
    for path in pages():
        tab.goto(f"{address}{path.relative_to(SITE)}")
        if (width := tab.evaluate("document.documentElement.scrollWidth")) > PHONE["width"]:
            wrong.append((tab.url, f"{width} px wide"))
    context.close()
    assert wrong == []


def test_the_first_page_is_small_and_its_figures_open(address, browser):
    sizes = []
    tab = browser.new_page(color_scheme="dark")
    tab.on("response", lambda answer: sizes.append(len(answer.body())))
    tab.goto(address, wait_until="networkidle")
    assert 0 < sum(sizes) <= FIRST_PAGE
    assert tab.evaluate("document.documentElement.dataset.theme") == "dark"
    for close in ("Escape", None):
        tab.locator("article img").first.click()
        whole = tab.locator("dialog[open] img")
        assert whole.bounding_box()["width"] > tab.locator("article img").first.bounding_box()["width"]
        tab.keyboard.press(close) if close else whole.click()
        whole.wait_for(state="detached")
    tab.close()


def test_search_finds_and_launch_lines_can_be_copied(address, browser):
    context = browser.new_context(permissions=["clipboard-read", "clipboard-write"])
    tab = context.new_page()
    tab.goto(f"{address}search.html?q=reduce-scatter")
    tab.wait_for_selector("#search-results li a", timeout=30_000)
    tab.goto(f"{address}docs/planner.html")
    line = tab.locator("div.highlight", has_text="$ python plan.py").first
    line.hover()
    line.locator("button.copybtn").click()
    copied = tab.evaluate("navigator.clipboard.readText()")
    assert copied == line.inner_text().splitlines()[0].removeprefix("$ ")
    context.close()


def settings() -> list[dict]:
    """Return 30 settings of the planner's page, drawn at random. "" leaves an option out."""
    draw, found = random.Random(1), []
    names = ("gpu", "strategy", "precision", "recompute")
    choices = {field.name: choices_of(field) for field in fields(Config)}
    for _ in range(30):
        drawn = {name: draw.choice(choices[name]) for name in names}
        drawn["preset"] = draw.choice([*choices["preset"], "", ""])
        drawn["config"] = "" if drawn["preset"] else draw.choice(CONFIGS)
        drawn["ranks"] = draw.choice(["", 1, 2, 7, 8, 64, 512])
        drawn["batch_size"], drawn["seq_len"] = draw.choice(["", 1, 3, 8]), draw.choice([128, 1000, 4096, 8192])
        found.append(drawn)
    return found


def plan(given: dict, folder: Path, *more: str) -> tuple[str, str]:
    """Return what plan.py prints on stdout and on stderr."""
    (folder / "config.json").write_text(given["config"])
    words = [] if given["preset"] else ["--config", "config.json"]
    for name, value in given.items():
        if name != "config" and value != "":
            words += [f"--{name.replace('_', '-')}", str(value)]
    program = [sys.executable, str(SOURCE / "plan.py")]
    done = subprocess.run([*program, *words, *more], cwd=folder, capture_output=True, text=True, timeout=60)
    assert done.returncode in (0, 2)
    return done.stdout, done.stderr


@pytest.fixture(scope="module")
def planner(address, browser):
    """The planner's page, once it has given its first answer."""
    tab = browser.new_page()
    tab.goto(address + PLANNER)
    tab.wait_for_selector("#planner[data-answered]", timeout=120_000)
    yield tab
    tab.close()


def ask(tab, given: dict) -> tuple[str, str]:
    """Return the answer and the refusal that the page shows for settings; one of both is empty."""
    fragment = "#" + urlencode(given)
    tab.evaluate("fragment => { location.hash = fragment }", fragment)
    tab.wait_for_function("asked => document.getElementById('planner').dataset.answered === asked", arg=fragment)
    shown = {name: tab.locator(f"#{name}").text_content() for name in ("json", "error")}
    refused = tab.locator("#answer").is_hidden()
    assert refused == tab.locator("#error").is_visible()
    return ("", shown["error"]) if refused else (shown["json"], "")


def test_the_planner_answers_as_plan_py_does_to_the_byte(planner, tmp_path):
    answers = 0
    for given in settings():
        expected, refusal = plan(given, tmp_path, "--json")
        assert ask(planner, given) == (expected, refusal.rstrip()), given
        answers += bool(expected)
    assert answers >= 15  # else the settings are mostly refused


@pytest.mark.parametrize("config", BAD)
def test_a_bad_config_is_refused_with_the_same_sentence(config, planner, tmp_path):
    given = settings()[0] | {"preset": "", "config": config}
    assert ask(planner, given) == ("", plan(given, tmp_path)[1].rstrip())


def test_the_answer_is_in_words_and_the_address_has_the_settings(planner, browser, address, tmp_path):
    given = {"preset": "llama3-8b", "config": "", "gpu": "a100", "ranks": 16, "strategy": "ddp", "precision": "bf16"}
    given |= {"recompute": "full", "batch_size": 1, "seq_len": 4096}
    ask(planner, given)
    text = plan(given, tmp_path)[0]
    assert planner.locator("#words").text_content() in text.splitlines()
    assert planner.locator("#command").text_content() == text.splitlines()[-1].strip()
    limit = planner.locator("#bar .limit").bounding_box()
    bar = planner.locator("#bar").bounding_box()
    assert limit["x"] + limit["width"] < bar["x"] + bar["width"] / 2  # DDP needs more than twice what there is

    planner.locator("[name=strategy]").select_option("fsdp2")
    assert shlex.split(planner.locator("#command").text_content()) == shlex.split(
        plan(given | {"strategy": "fsdp2"}, tmp_path)[0].splitlines()[-1]
    )
    other = browser.new_page()
    other.goto(planner.url)
    assert [other.locator(f"[name={name}]").input_value() for name in ("strategy", "gpu", "ranks")] == [
        "fsdp2",
        "a100",
        "16",
    ]
    other.close()


def fetch(folder: Path) -> tuple[int, str]:
    """Fetch Pyodide into a cache, from a registry that is not there. Returns (exit code, what is said)."""
    script = f"import pathlib, site_parts; site_parts.CACHE = pathlib.Path({str(folder)!r}); site_parts.fetch_pyodide()"
    environ = os.environ | {"npm_config_registry": "http://127.0.0.1:9", "no_proxy": "*"}
    words = [ROOT / ".venv-site" / "bin" / "python", "-c", script]
    done = subprocess.run(words, cwd=ROOT / "docs", env=environ, capture_output=True, text=True, timeout=60)
    return done.returncode, done.stderr.strip()


def test_without_the_registry_and_with_another_file_it_says_so(built, tmp_path):
    code, said = fetch(tmp_path)
    assert code and len(said.splitlines()) == 1 and "http://127.0.0.1:9/pyodide/" in said and str(tmp_path) in said
    (tmp_path / said.rpartition("/")[2]).write_bytes(b"something else")
    code, said = fetch(tmp_path)
    assert code and len(said.splitlines()) == 1 and "checksum" in said
