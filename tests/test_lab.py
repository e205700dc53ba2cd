"""`make lab` opens a pair of notebook and source, runs its cells, and saves both as they were."""

import json
import os
import shutil
from pathlib import Path
from urllib.request import Request, urlopen

import nbformat
import pytest
from harness import ROOT, Running, listens, wait_until
from jupyter_client import BlockingKernelClient
from jupyter_server.services.contents.largefilemanager import LargeFileManager
from jupytext.sync_contentsmanager import build_sync_jupytext_contents_manager_class
from test_notebooks import FOLDER, NAMES


@pytest.mark.parametrize("name", NAMES)
def test_opening_and_saving_a_pair_does_not_change_its_source(name, tmp_path):
    """This holds even if a checkout has made the .ipynb file the newer one."""
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
def test_make_lab_opens_a_notebook_and_runs_it(tmp_path):
    arguments = "ARGS=--no-browser --allow-root --ServerApp.port=0"
    env = {"JUPYTER_RUNTIME_DIR": str(tmp_path), "JUPYTER_CONFIG_DIR": str(tmp_path)}
    with Running("make", "-C", ROOT, "lab", arguments, cwd=tmp_path, env=env) as lab:
        lab.wait_for("is running at")
        wait_until(lambda: server_info(tmp_path))  # the file is empty for a moment
        server = json.loads(server_info(tmp_path))
        wait_until(lambda: listens(server["port"]))  # it says where it runs before that
        page = ask(server, "lab")
        assert "<title>JupyterLab</title>" in page
        opened = json.loads(ask(server, "api/contents/notebooks/00_what_ddp_is.ipynb"))
        notebook = nbformat.from_dict(opened["content"])
        session = {
            "path": opened["path"],
            "name": "",
            "type": "notebook",
            "kernel": {"name": "python3"},
        }
        kernel = json.loads(ask(server, "api/sessions", session))["kernel"]["id"]
        code = [cell.source for cell in notebook.cells if cell.cell_type == "code"]
        printed = run_cells(tmp_path / f"kernel-{kernel}.json", code[:2])
        assert "all 2 processes on cpu hold the same weights" in printed
        ask(server, "api/shutdown", {})
        assert lab.wait().code == 0


def server_info(folder):
    """Return what the server writes about itself."""
    return "".join(path.read_text() for path in folder.glob("jpserver-*.json"))


def ask(server, path, data=None):
    """Return the server's answer to a GET, or to a POST of `data`."""
    headers = {"Authorization": f"token {server['token']}"}
    body = None if data is None else json.dumps(data).encode()
    with urlopen(Request(server["url"] + path, body, headers), timeout=60) as answer:
        return answer.read().decode()


def run_cells(connection, cells):
    """Run `cells` in the kernel with this connection file. Return what they print."""
    client = BlockingKernelClient(connection_file=str(connection))
    client.load_connection_file()
    client.hb_channel.time_to_dead = 60  # a kernel that waits for a core is not dead
    client.start_channels()
    client.wait_for_ready(timeout=60)
    printed = []

    def listen(message):
        assert message["msg_type"] != "error", message["content"]
        printed.append(message["content"].get("text", ""))

    try:
        for cell in cells:
            client.execute_interactive(cell, timeout=60, output_hook=listen)
    finally:
        client.stop_channels()
    return "".join(printed)
