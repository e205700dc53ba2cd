"""`make lab` opens a pair of notebook and source, runs its cells, and saves both as they were."""

import json
import os
import shutil
import time
from pathlib import Path
from socket import create_connection
from urllib.request import Request, urlopen

import nbformat
import pytest
from harness import ROOT, Running
from jupyter_client import BlockingKernelClient
from jupyter_server.services.contents.largefilemanager import LargeFileManager
from jupytext.sync_contentsmanager import build_sync_jupytext_contents_manager_class
from test_notebooks import FOLDER, NAMES


@pytest.mark.parametrize("name", NAMES)
def test_a_pair_is_opened_and_saved_as_it_was(name, tmp_path):
    """Even if a checkout has made the .ipynb the newer one."""
    source = Path(shutil.copy(FOLDER / f"{name}.md", tmp_path))
    shutil.copy(FOLDER / f"{name}.ipynb", tmp_path)
    os.utime(source, (0, 0))
    manager = build_sync_jupytext_contents_manager_class(LargeFileManager)(root_dir=str(tmp_path))
    opened = manager.get(f"{name}.ipynb")
    assert any(cell.get("outputs") for cell in opened["content"]["cells"])
    manager.save(opened, f"{name}.ipynb")
    manager.notary.store.close()  # it holds a database
    assert source.read_text() == (FOLDER / f"{name}.md").read_text()


@pytest.mark.full
def test_make_lab_opens_a_notebook_and_runs_it(tmp_path):
    arguments = "ARGS=--no-browser --allow-root --ServerApp.port=0"
    env = {"JUPYTER_RUNTIME_DIR": str(tmp_path), "JUPYTER_CONFIG_DIR": str(tmp_path)}
    with Running("make", "-C", ROOT, "lab", arguments, cwd=tmp_path, env=env) as lab:
        lab.wait_for("is running at")
        server = what_is_told_of_the_server(tmp_path)
        wait_until_it_listens(server["port"])  # it says where it runs before it listens there
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
        said = run_cells(tmp_path / f"kernel-{kernel}.json", code[:5])
        assert "weights, as built" in said
        ask(server, "api/shutdown", {})
        assert lab.wait().code == 0


def what_is_told_of_the_server(folder, seconds=30):
    deadline = time.monotonic() + seconds
    while not (found := [path.read_text() for path in folder.glob("jpserver-*.json")]):
        assert time.monotonic() < deadline, "there is no file of a server"
        time.sleep(0.1)
    return json.loads(found[0])


def wait_until_it_listens(port, seconds=30):
    deadline = time.monotonic() + seconds
    while True:
        try:
            return create_connection(("localhost", port)).close()
        except ConnectionRefusedError:
            assert time.monotonic() < deadline, f"nothing listens on port {port}"
            time.sleep(0.05)


def ask(server, path, data=None):
    """Return what the server answers to GET, or to POST of `data`."""
    headers = {"Authorization": f"token {server['token']}"}
    body = None if data is None else json.dumps(data).encode()
    with urlopen(Request(server["url"] + path, body, headers), timeout=60) as answer:
        return answer.read().decode()


def run_cells(connection, cells):
    """Run `cells` in the kernel of that connection file; return what they printed."""
    client = BlockingKernelClient(connection_file=str(connection))
    client.load_connection_file()
    client.hb_channel.time_to_dead = 60  # a kernel that waits for a core is not dead
    client.start_channels()
    client.wait_for_ready(timeout=60)
    said = []

    def listen(message):
        assert message["msg_type"] != "error", message["content"]
        said.append(message["content"].get("text", ""))

    try:
        for cell in cells:
            client.execute_interactive(cell, timeout=60, output_hook=listen)
    finally:
        client.stop_channels()
    return "".join(said)
