"""What a learner sees: JupyterLab opens a notebook in a browser, runs all of it, and shows its figures."""

import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.request

import pytest

from notebooks import FOLDER, code_cells, read

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
NAME = "04_fsdp_one_unit.ipynb"
TOKEN = "learner"
QUIET = ["--no-sandbox", "--disable-quic", "--disable-background-networking", "--disable-component-update"]


@pytest.fixture
def course(tmp_path):
    """A copy of the course, so that running a notebook changes nothing here."""
    root = FOLDER.parent
    ignored = shutil.ignore_patterns("__pycache__", "runs")
    for folder in ("notebooks", "source_code", "images"):
        shutil.copytree(root / folder, tmp_path / folder, ignore=ignored)
    return tmp_path


@pytest.fixture
def jupyterlab(course):
    """The address of a JupyterLab that serves the copy."""
    words = [sys.executable, "-m", "jupyter", "lab", "--no-browser", "--allow-root", "--port=0"]
    words += [f"--IdentityProvider.token={TOKEN}", f"--ServerApp.root_dir={course}"]
    words += ["--LabApp.news_url=", "--LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate"]
    log = course / "jupyterlab.log"
    with log.open("w") as output:
        env = os.environ | {"JUPYTER_RUNTIME_DIR": str(course / "runtime"), "FSDP_LABS_LAUNCHER": "local"}
        server = subprocess.Popen(words, stdout=output, stderr=subprocess.STDOUT, env=env, start_new_session=True)
    try:
        yield _address(log)
    finally:
        server.send_signal(signal.SIGINT)
        server.send_signal(signal.SIGTERM)
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
def test_jupyterlab_runs_all_of_it_and_shows_the_figures(jupyterlab):
    if not CHROMIUM:
        if os.environ.get("FSDP_LABS_REQUIRE_ALL") == "1":
            pytest.fail("chromium is not installed")
        pytest.skip("chromium is not installed")
    from playwright.sync_api import expect, sync_playwright

    cells = code_cells(read(FOLDER / NAME))
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=QUIET)
        page = browser.new_page(viewport={"width": 1400, "height": 20000})  # all cells in view: none is left unrendered
        page.goto(f"{jupyterlab}/lab/tree/notebooks/{NAME}?token={TOKEN}")
        expect(page.locator(".jp-Notebook .jp-CodeCell").first).to_be_visible(timeout=60_000)
        # What is run before the kernel is there is forgotten.
        kernel = page.locator(".jp-Notebook-ExecutionIndicator")
        expect(kernel).to_have_attribute("data-status", "idle", timeout=60_000)
        page.get_by_role("menuitem", name="Edit", exact=True).click()
        page.get_by_text("Clear Outputs of All Cells", exact=True).click()
        expect(page.locator(".jp-Notebook .jp-OutputArea-output")).to_have_count(0)
        page.get_by_role("menuitem", name="Run", exact=True).click()
        page.get_by_text("Run All Cells", exact=True).click()
        last = page.locator(".jp-CodeCell .jp-InputPrompt").last
        expect(last).to_have_text(f"[{len(cells)}]:", timeout=150_000)

        prompts = page.locator(".jp-Notebook .jp-CodeCell .jp-InputPrompt").all_inner_texts()
        assert prompts == [f"[{number + 1}]:" for number in range(len(cells))]
        assert page.locator('[data-mime-type="application/vnd.jupyter.error"]').count() == 0
        figures = page.locator(".jp-OutputArea img")
        assert figures.count() == 3
        diagrams = page.locator(".jp-MarkdownOutput img")
        assert diagrams.count() == 3
        for picture in [*figures.all(), *diagrams.all()]:
            assert picture.evaluate("image => image.complete && image.naturalWidth > 300"), picture
        assert "FAIL  " not in page.inner_text(".jp-Notebook")
        browser.close()
