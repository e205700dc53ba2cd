"""A page that prints something else than it shows fails; links and rows lead to what exists."""

import re

import pytest
from fences import NOT_EXECUTED, SybilFailure, not_executed, pages, run_page
from harness import ROOT
from test_differences import functions_in

WRONG = [
    ("```python\nprint(1)\n```\n```text\n2\n```", "it prints:\n1\n\nthe page"),
    ("```console\n$ echo Error; echo more; false\nError\nmore\n```", "exit code 1"),
]


@pytest.mark.parametrize(("text", "message"), WRONG, ids=range(len(WRONG)))
def test_a_wrong_page_fails(tmp_path, text, message):
    (tmp_path / "page.md").write_text(text)
    with pytest.raises(SybilFailure, match=message):
        run_page(tmp_path / "page.md")


def test_every_row_is_read_and_names_a_page_and_tests():
    rows = not_executed()
    lines = [line for line in NOT_EXECUTED.read_text().splitlines() if line.startswith("| [")]
    assert len(rows) == len(lines) > 0
    for path, begins, test in rows:
        assert path in pages(), path
        names = re.findall(r"`(test_\w+\.py)::(test_\w+)`", test)
        assert names, begins
        for file, name in names:
            assert name in functions_in(file), (file, name)


FENCE = re.compile(r"^(`{3,})[^\n]*\n.*?^\1$", re.MULTILINE | re.DOTALL)


def prose(path):
    """Return the text of a page or of a notebook's source, without its fences."""
    return FENCE.sub("", path.read_text())


def anchors(path):
    """Return the anchors that GitHub makes from the headings of a page. The site makes the same."""
    headings = re.findall(r"^#+ (.+)$", prose(path), re.MULTILINE)
    plain = [re.sub(r"\]\([^)]*\)|[^\w\- ]", "", heading) for heading in headings]
    return {text.strip().lower().replace(" ", "-") for text in plain}


PAGES = [*pages(), ROOT / "CONTRIBUTING.md", NOT_EXECUTED]
PAGES += sorted((ROOT / "notebooks").glob("[0-9]*.md"))


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_links_lead_to_files_and_headings(path):
    """So they do on GitHub."""
    text = re.sub(r"`[^`\n]+`", "", prose(path))
    for link in re.findall(r"\]\((?!https?:)<?([^)>\s]+)>?\)", text):
        name, _, anchor = link.partition("#")
        target = path.parent / name if name else path
        assert target.exists(), link
        source = target.with_suffix(".md") if target.suffix == ".ipynb" else target
        assert not anchor or anchor in anchors(source), link
