"""Collect README.md and the pages of docs/ as tests: what a page shows is what happens."""

from pathlib import Path

import pytest
from fences import SybilFailure, pages, run_page


class Page(pytest.File):
    """A page; one test, as each of its fences goes on from the one before."""

    def collect(self):
        yield Fences.from_parent(self, name="fences")


class Fences(pytest.Item):
    """All fences of a page, in order."""

    def runtest(self):
        run_page(self.path)

    def repr_failure(self, excinfo):
        if isinstance(excinfo.value, SybilFailure):
            return str(excinfo.value)
        return super().repr_failure(excinfo)


def pytest_collect_file(file_path: Path, parent: pytest.Collector) -> pytest.File | None:
    is_page = file_path.suffix == ".md" and file_path in pages()
    return Page.from_parent(parent, path=file_path) if is_page else None
