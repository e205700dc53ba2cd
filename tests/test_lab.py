"""`make lab` opens a pair of notebook and source, and saves both as they were."""

import json
import os
import shutil
from pathlib import Path
from urllib.request import Request, urlopen

import pytest
from harness import ROOT, Running, listens, wait_until
from jupyter_server.services.contents.largefilemanager import LargeFileManager
from jupytext.sync_contentsmanager import build_sync_jupytext_contents_manager_class
from test_notebooks import FOLDER, NAMES


def test_opening_and_saving_a_pair_does_not_change_its_source(tmp_path):
    """This holds even if a checkout has made the .ipynb file the newer one."""
    name = NAMES[-1]
    source = Path(shutil.copy(FOLDER / f"{name}.md", tmp_path))
    shutil.copy(FOLDER / f"{name}.ipynb", tmp_path)
    os.utime(source, (0, 0))
    manager = build_sync_jupytext_contents_manager_class(LargeFileManager)(root_dir=str(tmp_path))
    opened = manager.get(f"{name}.ipynb")
    assert any(cell.get("outputs") for cell in opened["content"]["cells"])
    manager.save(opened, f"{name}.ipynb")
    manager.notary.store.close()  # it keeps a database open
    assert source.read_text() == (FOLDER / f"{name}.md").read_text()


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
