"""The site: `make docs` builds it from the repository's root, so links work here as on GitHub."""

from pathlib import Path

project = "DDP, step by step"
author = "the DDP course"
root_doc = "README"
html_title = project
language = "en"

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
extensions += ["sphinx.ext.githubpages"]  # .nojekyll: GitHub Pages would drop _static
include_patterns = ["README.md", "CONTRIBUTING.md", "docs/**.md", "notebooks/*.ipynb"]
include_patterns += ["tests/fakegpu/README.md"]
source_suffix = {".md": "myst-nb", ".ipynb": "myst-nb"}

nb_execution_mode = "off"  # the committed outputs, which `make test-notebooks` compares
myst_heading_anchors = 3
nitpicky = True
# Types of torch and of Python, whose pages are not fetched, and our type variables.
nitpick_ignore_regex = [("py:.*", r"(?!ddp_ref\.).*|ddp_ref\.\w+\.[A-Z]")]

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
default_role = "code"  # docstrings quote names with single backticks

html_theme = "furo"
html_favicon = "favicon.svg"
html_static_path, html_css_files = ["site.css", "planner"], ["site.css"]  # planner: of plan.md
html_extra_path = ["index.html"]  # leads to README.html
html_search_scorer = str(Path(__file__).with_name("scorer.js"))  # error messages first
copybutton_prompt_text = "$ "

# GitHub shows the README as it is; on the site it holds the order of all pages.
CONTENTS = """

```{toctree}
:hidden:
:caption: The notebooks
:glob:

notebooks/*
```

```{toctree}
:hidden:
:caption: How to
:glob:

docs/how-to/*
docs/slurm
```

```{toctree}
:hidden:
:caption: To look up

docs/cheat-sheet
docs/glossary
docs/plan
docs/gpu
tests/fakegpu/README
docs/troubleshooting
docs/nccl-hangs
docs/scripts
docs/reference
docs/platforms
docs/tutorial-mistakes
docs/differences
docs/fault-drill
docs/benchmarks
docs/growth
docs/not-executed
CONTRIBUTING
```
"""


def add_contents(app, docname, source):
    if docname == root_doc:
        source[0] += CONTENTS


def setup(app):
    app.connect("source-read", add_contents)
