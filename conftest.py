"""Make `pytest` work as it is typed: forked processes, notebooks in order, pages as tests."""

import os
from pathlib import Path

import pytest
import warm_shell
import warm_start
from fences import SybilFailure, pages, run_page
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling

SHARE_A_RUN = {"test_recovery.py", "test_training.py"}


def pytest_configure(config: pytest.Config) -> None:
    """Start the template that the processes of the tests are forked from."""
    if config.option.nbval:
        config.option.randomly_reorganize = False  # keeps a notebook's cells in order
    if "PYTEST_XDIST_WORKER" in os.environ or not config.getoption("numprocesses", None):
        warm_start.install()
        warm_shell.serve()


def pytest_unconfigure() -> None:
    warm_shell.stop()
    warm_start.uninstall()


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> "Scheduler":
    """Replace the scheduler of xdist, whose --dist=loadgroup has no effect under pytest 9.2."""
    return Scheduler(config, log)


class Scheduler(LoadScopeScheduling):
    """Distribute tests one at a time, but keep those with a costly start in common together."""

    def _split_scope(self, nodeid: str) -> str:
        """Return a name; tests with the same name run on one worker."""
        path, _, test = nodeid.partition("::")
        if path.endswith(".ipynb") or Path(path).name in SHARE_A_RUN:
            return path
        if test.startswith("test_on_ranks["):  # see rank_checks.py
            return f"{path} {test.partition('-')[0]}"
        return nodeid


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
