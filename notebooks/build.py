"""Make the notebooks from their MyST sources and run them: .md to .ipynb, never the other way.

python notebooks/build.py [notebooks/02_several_processes.md ...]    # without names: all
"""

import argparse
import sys
from pathlib import Path

import jupytext
import nbformat
from nbclient import NotebookClient

FOLDER = Path(__file__).resolve().parent
CELL_TIMEOUT = 240  # seconds
LANGUAGE = {"name": "python", "pygments_lexer": "ipython3"}  # `!command` is no Python


def build(source: Path) -> None:
    """Write the executed notebook beside its source; a cell that raises ends it unwritten."""
    notebook = jupytext.read(source)
    for number, cell in enumerate(notebook.cells, start=1):
        cell.id = f"cell-{number}"  # not random: what changed is what a diff shows
    resources = {"metadata": {"path": str(FOLDER)}}
    client = NotebookClient(
        notebook,
        timeout=CELL_TIMEOUT,
        resources=resources,
        record_timing=False,
        coalesce_streams=True,
    )
    client.execute()
    notebook.metadata["language_info"] = LANGUAGE  # not the version of this Python
    nbformat.validate(notebook)
    nbformat.write(notebook, source.with_suffix(".ipynb"))
    source.touch()  # JupyterLab opens a pair only if its source is not the older one


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("sources", nargs="*", type=Path, help="the .md files; none: all")
    args = parser.parse_args()
    sources = args.sources or sorted(FOLDER.glob("[0-9][0-9]_*.md"))
    for source in sources:
        if sys.stderr.isatty():
            print(f"running {source.name}", file=sys.stderr)
        build(source)


if __name__ == "__main__":
    main()
