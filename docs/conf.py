"""The site: `make docs` builds it from the repository's root, so links work here as on GitHub."""

import os
import re
from pathlib import Path

project = "DDP, step by step"
author = "the DDP course"
root_doc = "README"
html_title, html_show_copyright = project, False
language = "en"

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
extensions += ["sphinx.ext.githubpages"]  # .nojekyll: GitHub Pages would drop _static
ROOT = Path(__file__).parent.parent
include_patterns = ["README.md", "CONTRIBUTING.md", "docs/*.md", "docs/how-to/*.md"]
include_patterns += ["notebooks/*.ipynb", "tests/fakegpu/README.md"]
source_suffix = dict.fromkeys([".md", ".ipynb", ".py", ".sh", ".yaml"], "myst-nb")

# Each file of code that a page links to is a page itself, which show_code() makes.
for page in [page for pattern in include_patterns for page in ROOT.glob(pattern)]:
    for link in re.findall(r"\]\(([\w./-]+\.(?:py|sh|yaml))\)", page.read_text("utf-8")):
        include_patterns.append(str((page.parent / link).resolve().relative_to(ROOT)))

nb_execution_mode = "off"  # the committed outputs, which `make test-notebooks` compares
myst_heading_anchors = 3
suppress_warnings = ["misc.highlighting_failure"]  # a cell that writes a job script is no Python
nitpicky = True
# Types of torch and of Python, whose pages are not fetched, and our type variables.
nitpick_ignore_regex = [("py:.*", r"(?!ddp_ref\.).*|ddp_ref\.\w+\.[A-Z]")]

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
default_role = "code"  # docstrings quote names with single backticks

html_theme = "furo"
html_favicon = "favicon.svg"
html_static_path, html_css_files = ["site.css", "landing/landing.css"], ["site.css", "landing.css"]
html_static_path += ["planner"]  # of plan.md
html_static_path += ["figures/one_step.svg", "figures/course.svg"]  # of the front page
templates_path, html_additional_pages = ["landing"], {"index": "landing.html"}
html_search_scorer = str(Path(__file__).with_name("scorer.js"))  # error messages first
copybutton_prompt_text = "$ "

CHAPTERS = [f"notebooks/{path.stem}" for path in sorted(ROOT.glob("notebooks/*.ipynb"))]
HOW_TO = [
    "docs/how-to/launch",
    "docs/slurm",
    "docs/elastic",
    "docs/how-to/convert",
    "docs/how-to/handler",
    "docs/how-to/your-own-loop",
    "docs/how-to/yaml",
    "docs/how-to/port",
    "docs/how-to/copy",
]  # in the order of the README
LOOK_UP = [
    "docs/cheat-sheet",
    "docs/troubleshooting",
    "docs/nccl-hangs",
    "docs/gpu",
    "docs/reference",
    "docs/plan",
    "docs/differences",
]
EVIDENCE = [
    "docs/evidence",
    "docs/benchmarks",
    "tests/fakegpu/README",
    "CONTRIBUTING",
]
CAPTIONS = {
    "Start": ["README <self>"],
    "The chapters": CHAPTERS,
    "How to": HOW_TO,
    "To look up": LOOK_UP,
    "Evidence": EVIDENCE,
}


def add_contents(app, docname, source):
    """Add the order of all pages to the README, which GitHub shows without it."""
    if docname == root_doc:
        for caption, pages in CAPTIONS.items():
            entries = "\n".join(pages)
            source[0] += f"\n\n```{{toctree}}\n:hidden:\n:caption: {caption}\n\n{entries}\n```\n"


def show_code(app, docname, source):
    """Make a page of a file of code: links lead to it, and neither the contents nor the search."""
    path = app.env.doc2path(docname, base=False)
    if path.suffix not in (".md", ".ipynb"):
        fence = f"````````{path.suffix[1:]}\n{source[0]}\n````````"
        source[0] = f"---\norphan: true\nnosearch: true\n---\n# {path}\n\n{fence}\n"


def add_front_page(app, pagename, templatename, context, doctree):
    """Fill in the front page's lists, and link the site's name to the front page."""
    context["master_doc"] = "index"
    if pagename == "index":
        context["repository"] = os.environ.get("GITHUB_REPOSITORY", "OWNER/REPO")
        titles = {page: title.astext() for page, title in app.env.titles.items()}
        context["chapters"] = [(titles[page], page, question_of(page)) for page in CHAPTERS]
        context["how_to"] = [(titles[page], page) for page in HOW_TO]
        context["look_up"] = [(titles[page], page) for page in LOOK_UP]
        context["evidence"] = [(titles[page], page) for page in EVIDENCE]


def question_of(chapter):
    path = (ROOT / chapter).with_suffix(".md")
    found = re.search(r"^\| The question \| (.*) \|$", path.read_text("utf-8"), re.MULTILINE)
    if not found:
        raise ValueError(f"{path} has no row | The question | ... |: add it to the chapter's card")
    return found[1].replace("`", "")


def setup(app):
    app.connect("source-read", add_contents)
    app.connect("source-read", show_code)
    app.connect("html-page-context", add_front_page)
