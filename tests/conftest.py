"""No test may leak: the environment, the process group and the children are checked after each."""

import os

import psutil
import pytest
import torch.distributed as dist


@pytest.fixture(autouse=True)
def no_leaks():
    """Fail a test that leaves a process group, a changed environment or a child process."""
    ours = {key: value for key, value in os.environ.items() if key != "PYTEST_CURRENT_TEST"}
    children = set(psutil.Process().children(recursive=True))
    yield
    group_left = dist.is_initialized()
    if group_left:
        dist.destroy_process_group()
    now = {key: value for key, value in os.environ.items() if key != "PYTEST_CURRENT_TEST"}
    os.environ.clear()
    os.environ.update(ours)
    left = [p for p in psutil.Process().children(recursive=True) if p not in children]
    assert not group_left, "a process group was left open"
    assert now == ours, f"the environment changed: {set(now.items()) ^ set(ours.items())}"
    assert not left, f"child processes were left: {left}"
