"""Fixtures and hooks for all tests. After each test, `no_leaks` checks what it has left behind."""

import os
import shutil
import signal
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import psutil
import pytest
import torch.distributed as dist
from harness import ROOT, run
from hypothesis import settings
from slurm_cluster import Cluster

settings.register_profile("busy", deadline=None)  # an example may wait for a core
settings.load_profile("busy")


def pytest_configure(config):
    """Hide the GPUs, and handle SIGINT and SIGHUP again; what the tests start inherits that.

    Unless `-m gpu` selects the GPU tests, all tests say what happens on the CPU. A shell's
    background job ignores SIGINT, and nohup SIGHUP, but the tests need them.
    """
    if config.option.markexpr != "gpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def pytest_collection_modifyitems(items):
    """Run the tests that wait for minutes first, so that the others can run beside them.

    The rest stays in random order.
    """
    items.sort(key=lambda item: item.get_closest_marker("first") is None)


@pytest.fixture(scope="session")
def cluster():
    """Return a running Slurm cluster. Each pytest worker has its own."""
    with Cluster() as up:
        yield up


@pytest.fixture(scope="session")
def site(tmp_path_factory):
    """Build the site (warnings are errors), serve it, and return its pages, address and folder."""
    folder = tmp_path_factory.mktemp("site") / "html"
    built = run("make", "-C", ROOT, "docs", f"SITE={folder}", cwd=folder.parent)
    assert built.code == 0, built.stderr
    pages = sorted(str(page.relative_to(folder)) for page in folder.rglob("*.html"))
    handler = partial(SimpleHTTPRequestHandler, directory=folder)
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield pages, f"http://127.0.0.1:{server.server_port}", folder
        server.shutdown()


@pytest.fixture
def browser():
    """Start a headless Chromium."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        path = shutil.which("chromium") or shutil.which("google-chrome")
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(params=["no group", "a group of one"])
def alone(request, tmp_path):
    """Without a process group, and in one whose only rank is this process."""
    if request.param == "a group of one":
        store = dist.FileStore(str(tmp_path / "store"), 1)
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture(autouse=True)
def no_leaks():
    """Fail a test that leaves a process group, a changed environment or a child process."""
    before = dict(os.environ)
    children = set(psutil.Process().children(recursive=True))
    yield
    group_left = dist.is_initialized()
    if group_left:
        dist.destroy_process_group()
    changed = {name for name, _ in os.environ.items() ^ before.items()}
    by_imports = {"TORCHINDUCTOR_CACHE_DIR", "KMP_DUPLICATE_LIB_OK", "KMP_INIT_AT_FORK"}
    changed -= {"PYTEST_CURRENT_TEST", *by_imports}
    for name in changed:
        os.environ.pop(name, None)
    os.environ.update({name: before[name] for name in changed & {*before}})
    left = set(psutil.Process().children(recursive=True)) - children
    assert not group_left, "a process group was left open"
    assert not changed, f"environment variables were changed: {changed}"
    assert not left, f"child processes were left: {left}"
