"""A copy of the package works in another project, under another name. It imports little."""

import ast
import re
import shutil
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from harness import ROOT, run, torchrun
from lines_of_code import lines_of_code

PACKAGE = ROOT / "src" / "ddp_ref"
# What the page about a copy says to keep.
CORE = {"launch", "initialize", "collectives", "decorators", "randomness"}
LOADERS = CORE | {"data", "model", "metrics", "settings", "signals"}


def copy_package(folder, kept):
    """Copy these files to mylib/ddp in `folder`, and only their lines of `__init__.py`."""
    copy = folder / "mylib" / "ddp"
    copy.mkdir(parents=True)
    for name in kept:
        shutil.copy(PACKAGE / f"{name}.py", copy)
    start = ast.parse((PACKAGE / "__init__.py").read_text())
    imports = [node for node in start.body if isinstance(node, ast.ImportFrom)]
    kept_lines = [ast.unparse(node) for node in imports if node.module in kept]
    (copy / "__init__.py").write_text("\n".join(kept_lines))


TRAIN = """
import sys, torch
from mylib.ddp import Handler, cleanup_ddp, initialize_ddp, on_rank, reduce_sum

info = initialize_ddp(backend="gloo")
assert on_rank(0, broadcast=True)(lambda: reduce_sum.__module__)() == "mylib.ddp.collectives"
assert reduce_sum({"rank": info.rank})["rank"] == 1 and info.world_size == 2
torch.manual_seed(0)
model = torch.nn.Linear(2, 1)
handler = Handler(model, torch.optim.SGD(model.parameters(), 0.1), torch.nn.MSELoss())
points = torch.rand(32, 2, generator=torch.Generator().manual_seed(0))
handler.set_train_loader(torch.utils.data.TensorDataset(points, points.sum(1, keepdim=True)), 4)
handler.train(5)
assert handler.train_losses[-1] < handler.train_losses[0]
cleanup_ddp()
assert not any(name.startswith("ddp_ref") for name in sys.modules)
"""


@pytest.mark.full
def test_handler_trains_on_two_ranks_without_the_optional_modules(tmp_path):
    modules = {path.stem for path in PACKAGE.glob("*.py")}
    copy_package(tmp_path, modules - {"__init__", "figures", "trainer", "workers"})
    (tmp_path / "train.py").write_text(TRAIN)
    env = {"PYTHONPATH": str(tmp_path)}
    result = run(*torchrun(2, tmp_path / "train.py"), cwd=tmp_path, env=env)
    assert result.code == 0, result.stdout + result.stderr


@pytest.mark.parametrize(("kept", "name"), [(CORE, "on_rank"), (LOADERS, "train_loader")])
def test_parts_of_the_package_need_no_handler(tmp_path, kept, name):
    copy_package(tmp_path, kept)
    ended = run(sys.executable, "-c", f"from mylib.ddp import {name}", cwd=tmp_path)
    assert ended.code == 0, ended.stderr


def test_import_needs_only_torch_and_cloudpickle(tmp_path):
    code = """if True:
        import sys, torch
        before = set(sys.modules)
        import ddp_ref
        print(sorted({name.split(".")[0] for name in set(sys.modules) - before}))
    """
    ended = run(sys.executable, "-c", code, cwd=tmp_path, fresh=True)
    assert ended.code == 0, ended.stderr
    loaded = {*ast.literal_eval(ended.stdout)}
    assert loaded - sys.stdlib_module_names <= {"ddp_ref", "cloudpickle"}


@pytest.mark.full  # pip downloads the tools, and hatchling to build the package
def test_what_pip_installs_is_the_package_alone(tmp_path):
    project = tmp_path / "project"
    shutil.copytree(ROOT / "src", project / "src", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE", "datautils.py", "tests/test_copy.py"):
        (project / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, project / name)
    tools = project / "tools" / "bin"
    install = [tools / "pip", "install", "--quiet"]

    def do(*command):
        ended = run(*command, cwd=project, timeout=300)
        assert ended.code == 0, ended.stdout + ended.stderr
        return ended.stdout

    do(sys.executable, "-m", "venv", "tools")
    tools_of_a_release = ["build", "check-wheel-contents", "twine"]
    do(*install, "--constraint", ROOT / "constraints.txt", *tools_of_a_release)
    do(tools / "python", "-m", "build")  # the sdist, and from it the wheel
    (sdist,), (wheel,) = ((project / "dist").glob(name) for name in ("*.tar.gz", "*.whl"))
    do(tools / "twine", "check", "--strict", sdist, wheel)
    do(tools / "check-wheel-contents", wheel)
    do(*install, "--no-deps", wheel)
    files = {f"ddp_ref/{path.relative_to(PACKAGE)}" for path in PACKAGE.rglob("*.py")}
    names = zipfile.ZipFile(wheel).namelist()
    assert {n for n in names if ".dist-info/" not in n} == files | {"ddp_ref/py.typed"}
    find = "from importlib.util import find_spec; print(find_spec('ddp_ref').origin)"
    place = Path(do(tools / "python", "-c", find).strip())
    version = re.search(r'__version__ = "(.+)"', place.read_text())[1]
    assert tools.parent in place.parents and wheel.name.startswith(f"ddp_ref-{version}-")
    with tarfile.open(sdist) as archive:
        assert not any("test" in name for name in archive.getnames())


def test_the_package_stays_small():
    lines = {file.name: lines_of_code(file.read_text()) for file in PACKAGE.rglob("*.py")}
    assert max(lines.values()) <= 560, lines
    assert sum(lines.values()) <= 3160, lines
