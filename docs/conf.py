# SPDX-License-Identifier: BSD-3-Clause
"""Configure the site: Sphinx reads README.md, docs/, and the notebooks with the outputs they are committed with.

``make site`` builds it. site_parts.py writes the pages that are made from the source and the records beforehand.
"""

import json
import re
import shutil
import sys
from pathlib import Path

from docutils import nodes
from sphinx.addnodes import pending_xref

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "source_code"), str(ROOT / "docs")]

from site_parts import NOT_INSTALLED  # noqa: E402

project, author, copyright = "FSDP Labs", "FSDP Labs' authors", "FSDP Labs' authors; text and figures CC BY 4.0"
extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
root_doc = "README"
include_patterns = [
    *("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs/*.md", "docs/generated/*.md"),
    *("notebooks/*.ipynb", "notebooks/glossary.md", "source_code/proofs/README.md"),
]
# What is left out is not even looked through: an environment of Python has a hundred thousand files.
exclude_patterns = [
    ".*",
    "build",
    "images",
    "tests",
    "data",
    "source_code/[!p]*",
    "source_code/planner",
    "**/__pycache__",
]

nb_execution_mode = "off"
nb_ipywidgets_js = {}  # sliders need a kernel; their scripts would come from a CDN
nb_merge_streams = True
myst_heading_anchors = 4
suppress_warnings = ["mystnb.unknown_mime_type"]

autodoc_mock_imports = NOT_INSTALLED
autodoc_member_order = "bysource"
autodoc_typehints = "none"
napoleon_use_ivar = True  # else a documented attribute of a class is listed twice
python_use_unqualified_type_names = True

html_domain_indices = False
html_theme = "sphinx_book_theme"
html_title = project
html_static_path = ["_static", "../build/static"]
html_context = {"default_mode": "auto"}  # dark where the reader's system is
html_favicon = "_static/favicon.svg"
html_css_files = ["site.css"]
html_js_files = [("zoom.js", {"defer": "defer"})]
html_theme_options = {
    "use_download_button": True,
    "use_fullscreen_button": False,
    "navbar_persistent": [],
    "show_navbar_depth": 1,
    "home_page_in_toc": True,
}
copybutton_prompt_text = r"\$ "
copybutton_prompt_is_regexp = True
copybutton_line_continuation_character = "\\"
copybutton_selector = "div.highlight pre"

CHAPTER = re.compile(
    r"^\| (\**)\[(\d\d · [^\]]+)\]\((notebooks/\w+)\.ipynb\)", re.M
)  # bold in README.md: the fast lane
SECTIONS = {
    "Tools": [
        "docs/generated/try_the_planner",
        "docs/planner",
        "docs/generated/scripts",
        "docs/your_model",
        "docs/one_gpu",
    ],
    "Guides": [
        "docs/cluster",
        "docs/instructor",
        "docs/troubleshooting",
        "docs/measuring",
        "docs/what_ran_where",
        "docs/gpu_hour",
        "docs/source",
    ],
    "Reference": [
        *("notebooks/glossary", "docs/generated/records", "docs/knobs", "docs/families", "docs/loading"),
        *("docs/published", "source_code/proofs/README", "docs/generated/api_*"),
    ],
    "The project": ["CONTRIBUTING", "CHANGELOG"],
}


def add_navigation(app, name: str, source: list[str]):
    """Append the site's tables of contents to README.md, whose table of chapters says which are in the fast lane."""
    if name == root_doc:
        chapters = [f"{'★ ' if bold else ''}{title} <{path}>" for bold, title, path in CHAPTER.findall(source[0])]
        sections = {"The course (★ fast lane)": chapters, **SECTIONS}
        for caption, entries in sections.items():
            lines = [
                ":hidden:",
                ":glob:",
                f":caption: {caption}",
                "",
                *(f"/{e}" if "<" not in e else e for e in entries),
            ]
            source[0] += "\n\n```{toctree}\n" + "\n".join(lines) + "\n```\n"


def describe_figures(app, tree):
    """Give the figures that a notebook's cells have drawn the descriptions in the notebook."""
    path = ROOT / f"{app.env.docname}.ipynb"
    if path.exists():
        cells = [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]
        outputs = [output for cell in cells for output in cell["outputs"] if "image/png" in output.get("data", {})]
        figures = [image for image in tree.findall(nodes.image) if "alt" not in image]
        for image, output in zip(figures, outputs, strict=True):
            image["alt"] = output["metadata"]["image/png"]["alt"]


def link_folders(app, tree):
    """Let links to folders lead to the pages that list their files."""
    for link in tree.findall(pending_xref):
        folder = (ROOT / app.env.docname).parent / link.get("reftarget", "")
        if link.get("reftype") == "myst" and folder.is_dir():
            page = "records" if "results" in folder.parts else "scripts"
            link.attributes |= {"refdomain": "std", "reftype": "doc", "reftarget": f"/docs/generated/{page}"}


def link_notebook(app, name: str, template: str, context: dict, tree):
    """Put a link to the notebook itself above a chapter."""
    if name.startswith("notebooks/") and (ROOT / f"{name}.ipynb").exists():
        file = Path(name).name + ".ipynb"
        link = f'<p class="notebook-file"><a href="../_sources/{name}.ipynb" download="{file}">Download {file}</a></p>'
        context["body"] = link + context["body"]


def write_first_page(app, error):
    """Let the site open with README.md."""
    if not error:
        shutil.copy(Path(app.outdir) / "README.html", Path(app.outdir) / "index.html")


def keep_columns(app, what: str, name: str, thing, options, lines: list[str]):
    """Keep the lines of a module's docstring as they are if it has columns."""
    if what == "module" and any(line.startswith("  ") for line in lines):
        start = lines.index("") + 1
        lines[start:] = [".. code-block:: none", "", *(f"  {line}" for line in lines[start:])]


def setup(app):
    app.connect("autodoc-process-docstring", keep_columns)
    app.connect("source-read", add_navigation)
    app.connect("doctree-read", describe_figures)
    app.connect("doctree-read", link_folders)
    app.connect("html-page-context", link_notebook)
    app.connect("build-finished", write_first_page)
