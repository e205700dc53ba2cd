"""The clients' tests run in an environment of their own, by `make test-clients`.

That environment has the clients' packages and takes torch from `.venv`. In `.venv` itself, where
those packages are missing, pytest does not even look at these tests: `make test` and plain
`pytest` leave them out.
"""

import sys
from pathlib import Path

import pytest

IN_PLACE = Path(sys.prefix).name.endswith("-clients")
collect_ignore_glob = [] if IN_PLACE else ["test_*.py"]


def pytest_report_header():
    """Say what to do if somebody runs pytest on this folder in the wrong environment."""
    return None if IN_PLACE else "clients: left out here, run `make test-clients`"


@pytest.fixture(autouse=True)
def quiet(monkeypatch):
    """Keep the libraries from calling home, and MLflow from refusing to write files."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
