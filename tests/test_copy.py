"""The package copied into another project, under another name, works; and it imports little."""

import ast
import shutil
import sys
import zipfile

import pytest
from harness import ROOT, run

PACKAGE = ROOT / "src" / "ddp_ref"
LAYERS = [  # an import only ever points upwards in this list
    *["hostlist", "environment", "rendezvous", "initialize", "collectives"],
    *["errors", "outcomes", "decorators", "pickling", "worker", "executor", "launch"],
    *["randomness", "resume", "data", "position", "checkpoint"],
    *["callbacks", "plotting", "run_folder"],
    *["batches", "evaluation", "exchange", "objective", "optimization", "replicas", "handler"],
    *["schema", "configuration", "trainer"],
    *["doctor", "__init__", "__main__"],
]
SMOKE = """
import sys
import torch
from mylib.ddp import ParallelExecutor, cleanup_ddp, initialize_ddp, on_rank, run_ranks

@on_rank(0, broadcast=True)
def write(text):
    print("rank 0 writes", text)
    return text.upper()

def job(start):
    info = initialize_ddp(backend="gloo")
    total = torch.tensor([float(start + info.rank)])
    torch.distributed.all_reduce(total)
    text = write("a line")
    cleanup_ddp()
    return info.rank, total, text

print(run_ranks(job, 10))
with ParallelExecutor(num_gpus=2) as executor:
    print(executor.run(lambda device, x: (str(device), x * 2), torch.tensor([1, 2])))
assert not any(name.split(".")[0] == "ddp_ref" for name in sys.modules)
"""


def test_a_copy_under_another_name_works(tmp_path):
    shutil.copytree(PACKAGE, tmp_path / "mylib" / "ddp", ignore=shutil.ignore_patterns("__pyc*"))
    (tmp_path / "train.py").write_text(SMOKE)
    result = run(sys.executable, "train.py", cwd=tmp_path)
    assert result.code == 0, result.stdout + result.stderr
    assert "[rank 0] rank 0 writes a line" in result.stdout
    assert "[(0, tensor([21.]), 'A LINE'), (1, tensor([21.]), 'A LINE')]" in result.stdout
    assert "tensor([2, 4])" in result.stdout
    doctor = run(sys.executable, "-m", "mylib.ddp", "doctor", "--json", cwd=tmp_path)
    assert doctor.code == 0, doctor.stdout


def test_import_is_light(tmp_path):
    """torch and cloudpickle only; what a figure, a bar or a configuration needs comes later."""
    code = """if True:
        import sys, torch
        before = set(sys.modules)
        import ddp_ref
        print(sorted({name.split(".")[0] for name in set(sys.modules) - before}))
    """
    loaded = ast.literal_eval(run(sys.executable, "-c", code, cwd=tmp_path, fresh=True).stdout)
    foreign = {name for name in loaded if name not in sys.stdlib_module_names}
    assert foreign <= {"ddp_ref", "cloudpickle"}


@pytest.mark.parametrize("module", LAYERS)
def test_imports_point_upwards(module):
    """One room an idea, and no circle: a module imports only from those above it, relatively."""
    for node in ast.walk(ast.parse((PACKAGE / f"{module}.py").read_text())):
        if isinstance(node, ast.ImportFrom) and node.level == 1:
            assert LAYERS.index(node.module or "__init__") < LAYERS.index(module), node.module
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        assert not any(name.startswith("ddp_ref") for name in names)


def test_every_module_has_its_place():
    assert sorted(LAYERS) == sorted(path.stem for path in PACKAGE.glob("*.py"))


@pytest.mark.full  # pip loads setuptools to build it
def test_what_pip_installs_has_the_package_and_the_data(tmp_path):
    project = tmp_path / "project"
    shutil.copytree(ROOT / "src", project / "src", ignore=shutil.ignore_patterns("*.egg-info"))
    for name in ("pyproject.toml", "README.md", "LICENSE", "datautils.py"):
        shutil.copy(ROOT / name, project)
    ended = run(sys.executable, "-m", "pip", "wheel", "--no-deps", "./project", cwd=tmp_path)
    assert ended.code == 0, ended.stderr
    (wheel,) = tmp_path.glob("ddp_ref-*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    modules = {f"ddp_ref/{path.name}" for path in PACKAGE.glob("*.py")}
    assert modules | {"datautils.py"} <= names
