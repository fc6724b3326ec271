# SPDX-License-Identifier: BSD-3-Clause
"""A learner's first hour in a browser: JupyterLab runs all of notebook 00, shows its figures, and takes an exercise's answer."""

import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.request

import nbformat
import pytest
from labkit.teaching.exercises import chapter_00

from notebooks import FOLDER, code_cells, read

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
NAME = "00_start_here.ipynb"
EXERCISE = "00.1"
TOKEN = "learner"
KERNEL_ANSWERS = """async () => {
    const session = window.jupyterapp.shell.currentWidget.sessionContext;
    await session.ready;
    await session.session.kernel.info;
}"""
QUIET = ["--no-sandbox", "--disable-quic", "--disable-background-networking", "--disable-component-update"]


SETTINGS = f"""
c.IdentityProvider.token = "{TOKEN}"
c.ServerApp.port = 0
c.ServerApp.allow_root = True
c.ServerApp.open_browser = False
c.LabApp.news_url = ""
c.LabApp.check_for_updates_class = "jupyterlab.NeverCheckForUpdate"
c.LabApp.expose_app_in_browser = True
"""


@pytest.fixture
def course(tmp_path):
    """A copy of the course, so that running a notebook changes nothing here; the notebook without its outputs."""
    course = tmp_path / "course"
    shutil.copytree(FOLDER.parent, course, ignore=shutil.ignore_patterns(".*", "__pycache__", "runs", "build"))
    (course / ".venv").symlink_to(sys.prefix)
    notebook = read(course / "notebooks" / NAME)
    for cell in code_cells(notebook):
        cell.outputs, cell.execution_count = [], None
    nbformat.write(notebook, course / "notebooks" / NAME)
    return course


@pytest.fixture
def jupyterlab(course, tmp_path):
    """The address of what ``make lab`` serves. -o: what is installed need not be installed again."""
    folders = {f"JUPYTER_{kind}_DIR": str(tmp_path / kind) for kind in ("CONFIG", "RUNTIME", "DATA")}
    folders |= {
        "JUPYTERLAB_WORKSPACES_DIR": str(tmp_path / "workspaces")
    }  # an earlier one would open its notebook again
    (tmp_path / "CONFIG").mkdir()
    (tmp_path / "CONFIG" / "jupyter_server_config.py").write_text(SETTINGS)
    log = tmp_path / "jupyterlab.log"
    with log.open("w") as output:
        env = os.environ | folders | {"FSDP_LABS_LAUNCHER": "local"}
        words = ["make", "lab", "-o", ".venv/ready"]
        server = subprocess.Popen(
            words, cwd=course, stdout=output, stderr=subprocess.STDOUT, env=env, start_new_session=True
        )
    try:
        yield _address(log)
    finally:
        os.killpg(server.pid, signal.SIGTERM)
        try:
            server.wait(30)
        finally:
            if server.poll() is None:
                os.killpg(server.pid, signal.SIGKILL)


def _address(log) -> str:
    """Where the server says it is, once it answers there."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        lines = [word for word in log.read_text().split() if word.startswith("http://127.0.0.1")]
        if lines:
            address = lines[0].split("/lab")[0]
            try:
                urllib.request.urlopen(f"{address}/api?token={TOKEN}", timeout=5).close()
                return address
            except OSError:
                pass
        time.sleep(0.2)
    raise AssertionError(log.read_text())


@pytest.mark.browser
def test_the_first_hour_runs_to_its_end_and_an_exercise_is_answered(jupyterlab):
    if not CHROMIUM:
        if os.environ.get("FSDP_LABS_REQUIRE_ALL") == "1":
            pytest.fail("chromium is not installed")
        pytest.skip("chromium is not installed")
    from playwright.sync_api import expect, sync_playwright

    notebook = read(FOLDER / NAME)
    cells = code_cells(notebook)
    shown = sum("image/png" in output.get("data", ()) for cell in cells for output in cell.outputs)
    drawn = sum(cell.source.count("![") for cell in notebook.cells if cell.cell_type == "markdown")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=QUIET)
        page = browser.new_page(viewport={"width": 1400, "height": 30000})  # all cells in view: none is left unrendered
        page.goto(f"{jupyterlab}/lab/tree/notebooks/{NAME}?token={TOKEN}")
        expect(page.locator(".jp-Notebook .jp-CodeCell").first).to_be_visible(timeout=60_000)
        expect(page.locator(".jp-Notebook .jp-CodeCell")).to_have_count(len(cells), timeout=60_000)
        page.evaluate(KERNEL_ANSWERS)  # what is run before it does is forgotten
        page.get_by_role("menuitem", name="Run", exact=True).click()
        page.get_by_text("Run All Cells", exact=True).click()
        last = page.locator(".jp-CodeCell .jp-InputPrompt").last
        expect(last).to_have_text(f"[{len(cells)}]:", timeout=540_000)

        prompts = page.locator(".jp-Notebook .jp-CodeCell .jp-InputPrompt").all_inner_texts()
        assert prompts == [f"[{number + 1}]:" for number in range(len(cells))]
        assert page.locator('[data-mime-type="application/vnd.jupyter.error"]').count() == 0
        figures = page.locator(".jp-OutputArea img")
        assert figures.count() == shown > 0
        diagrams = page.locator(".jp-MarkdownOutput img")
        assert diagrams.count() == drawn > 0
        for picture in [*figures.all(), *diagrams.all()]:
            assert picture.evaluate("image => image.complete && image.naturalWidth > 300"), picture
        assert "FAIL  " not in page.inner_text(".jp-Notebook")

        call = f'check("{EXERCISE}", live_bytes)'
        cell = page.locator(".jp-CodeCell", has_text=call)
        assert ": right" not in cell.locator(".jp-OutputArea").inner_text()
        cell.locator(".cm-content").click()
        page.keyboard.press("Control+A")
        page.keyboard.insert_text(f"{chapter_00.EXERCISES[EXERCISE].solution}\n{call}")
        page.keyboard.press("Shift+Enter")
        expect(cell.locator(".jp-OutputArea")).to_contain_text(": right", timeout=60_000)
        browser.close()
