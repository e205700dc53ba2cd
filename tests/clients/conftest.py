"""The clients' tests run in an environment of their own, by `make test-clients`.

That environment has the clients' packages and takes torch from `.venv`. In `.venv` itself, where
those packages are missing, pytest does not even look at these tests: `make test` and plain
`pytest` leave them out.
"""

import sys
from pathlib import Path

import pytest

collect_ignore_glob = [] if Path(sys.prefix).name.endswith("-clients") else ["test_*.py"]


@pytest.fixture(autouse=True)
def quiet(monkeypatch):
    """Keep the libraries from calling home, and MLflow from refusing to write files."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
