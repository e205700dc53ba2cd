"""Make `pytest` work as it is typed: what it leaves out, notebooks in order, pages as tests."""

import os
from importlib.metadata import version
from pathlib import Path

import pytest
import warm_shell
import warm_start
from fences import SybilFailure, pages, run_page
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling

LONG = "full"  # a long cross: left out unless -m asks for it
ON_REQUEST = {"exercises", "site", "slurm"}  # left out unless -m or the test's file is named
SHARE_A_RUN = {"test_recovery.py", "test_training.py"}


def pytest_configure(config: pytest.Config) -> None:
    """Start the template that the processes of the tests are forked from."""
    if "PYTEST_XDIST_WORKER" in os.environ or not config.getoption("numprocesses", None):
        warm_start.install()
        warm_shell.serve()


def pytest_unconfigure() -> None:
    warm_shell.stop()
    warm_start.uninstall()


def pytest_report_header() -> str:
    """Say at the top of a run which torch it tests; pytest itself names the Python."""
    fake = os.environ.get("FAKE_GPUS")
    return f"torch: {version('torch')}" + (f" on {fake} fake GPUs" if fake else "")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what takes long or needs root, and put a notebook's cells in order."""
    if not config.option.markexpr:
        leave_out(config, items)
    keep_cells_in_order(items)


def leave_out(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect the tests that a make target of their own runs, unless they are named."""
    folder = config.invocation_params.dir
    parts = [argument.partition("::") for argument in config.args]
    named = {(os.path.normpath(folder / path), test) for path, _, test in parts}

    def is_left_out(item: pytest.Item) -> bool:
        marks = {mark.name for mark in item.iter_markers()}
        path, test = str(item.path), item.nodeid.partition("::")[2]
        if any(test.startswith(name) and name for file, name in named if file == path):
            return False
        return LONG in marks or ((path, "") not in named and bool(marks & ON_REQUEST))

    left_out = {item for item in items if is_left_out(item)}
    items[:] = [item for item in items if item not in left_out]
    config.hook.pytest_deselected(items=[*left_out])


def keep_cells_in_order(items: list[pytest.Item]) -> None:
    """Undo the shuffling of a notebook's cells."""
    place: dict[Path, int] = {}
    order = {}
    for index, item in enumerate(items):
        cell = getattr(item, "cell_num", None)  # nbval's items have one
        if cell is None:
            order[item] = (index, 0)
        else:
            order[item] = (place.setdefault(item.path, index), cell)
    items.sort(key=order.__getitem__)


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
