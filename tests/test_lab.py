"""`make lab` starts JupyterLab, which finds the notebooks."""

import json
from urllib.request import Request, urlopen

import pytest
from harness import ROOT, Running, listens, wait_until


@pytest.mark.full
def test_make_lab_opens_a_notebook(tmp_path):
    """`make test-notebooks` runs its cells."""
    arguments = "ARGS=--no-browser --allow-root --ServerApp.port=0"
    env = {"JUPYTER_RUNTIME_DIR": str(tmp_path), "JUPYTER_CONFIG_DIR": str(tmp_path)}
    with Running("make", "-C", ROOT, "lab", arguments, cwd=tmp_path, env=env) as lab:
        lab.wait_for("is running at")

        def written():
            return "".join(path.read_text() for path in tmp_path.glob("jpserver-*.json"))

        wait_until(written)  # the file is empty for a moment
        server = json.loads(written())
        wait_until(lambda: listens(server["port"]))  # it says where it runs before that

        def ask(path, body=None):
            headers = {"Authorization": f"token {server['token']}"}
            with urlopen(Request(server["url"] + path, body, headers), timeout=60) as answer:
                return answer.read().decode()

        assert "<title>JupyterLab</title>" in ask("lab")
        opened = json.loads(ask("api/contents/notebooks/00_what_ddp_is.ipynb"))["content"]
        assert opened["cells"][0]["source"].startswith("# 00 ")
        ask("api/shutdown", b"{}")
        assert lab.wait().code == 0
