"""Running the fences of a page can fail: every way in which a page can be wrong is an error."""

import re

import pytest
from fences import NOT_EXECUTED, SybilFailure, not_executed, pages, run_page
from harness import ROOT
from test_differences import functions_in

WRONG = [
    ("```python\nprint(1)\n```\n```text\n2\n```", "it prints:\n1\n\nthe page"),
    ("```python\n\n1 / 0\n```", 'page_1.py", line 3(.|\n)*ZeroDivisionError'),
    ("```console\n$ echo Error; echo more; false\nError\nmore\n```", "exit code 1"),
    ("```yaml\na: 1\n```", "'yaml' cannot be run: list it in not_executed.md"),
]


def page(folder, text, rows=""):
    """Write a page, and a table of those of its fences that are not executed."""
    (folder / "table.md").write_text(rows)
    (folder / "page.md").write_text(text)
    return folder / "page.md", folder / "table.md"


@pytest.mark.parametrize(("text", "message"), WRONG, ids=range(len(WRONG)))
def test_a_wrong_page_fails(tmp_path, text, message):
    with pytest.raises((SybilFailure, AssertionError), match=message):
        run_page(*page(tmp_path, text))


def test_a_listed_fence_is_left_out(tmp_path):
    row = "| [a page](page.md) | `{}` | needs a GPU | `test_fences.py::test_a_wrong_page_fails` |\n"
    text = "```console\n$ false\n```\n```python\nfirst = 1 / 0\n```\n```text\nnever\n```"
    run_page(*page(tmp_path, text, row.format("$ false") + row.format("first =")))
    with pytest.raises(ValueError, match=r"not there: \['second'\]"):
        run_page(*page(tmp_path, text, row.format("second")))
    with pytest.raises(SybilFailure, match="exit code 1"):  # a row leaves out one fence
        run_page(*page(tmp_path, "```console\n$ false\n```\n" * 2, row.format("$ false")))


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


def test_the_readme_links_to_every_how_to_page():
    linked = set(re.findall(r"\]\((docs/how-to/[\w-]+\.md)\)", (ROOT / "README.md").read_text()))
    assert linked == {f"docs/how-to/{path.name}" for path in (ROOT / "docs/how-to").glob("*.md")}
