"""Tests that need the fake GPU: how often training waits, MIG slices, and the GPU report."""

import os
import re
import sys

import pytest
import torch
from harness import ROOT, SCRIPTS, run, torchrun
from training_job import job

from ddp_ref import Callback

if "FAKE_GPUS" not in os.environ:
    pytest.skip("needs the fake GPU: make test-fakegpu", allow_module_level=True)

pytestmark = pytest.mark.gpu
WAITS = ("streamSync", "eventSync", "deviceSync", "memcpySync")
STEPS = 20


class Counts(Callback):
    """Keep the counters after each step."""

    def __init__(self):
        self.after = []

    def on_step_end(self):
        self.after.append(torch._fake_counts())


def counts_of_20_steps(**options):
    """Return how much each counter grows during steps 21 to 40."""
    counts = Counts()
    job(600, 10, device="cuda", callbacks=[counts], **options).train(1)
    before, after = counts.after[STEPS - 1], counts.after[2 * STEPS - 1]
    return {name: after[name] - before[name] for name in after}


@pytest.mark.parametrize(
    ("options", "waits"),
    [
        pytest.param({}, 2, id="fp32"),
        pytest.param({"sync_every": 5}, 4, id="sync_every=5"),
        pytest.param({"precision": "bf16", "clip_norm": 1.0}, 2, id="bf16 with clipping"),
        pytest.param({"metrics": {"mean": lambda out, _: out.mean()}}, 2, id="a metric: tensor"),
        pytest.param({"metrics": {"one": lambda *_: 1.0}}, 2, id="a metric: float"),
        pytest.param({"count": lambda batch: len(batch[1])}, 2, id="count"),
        pytest.param({"on_nonfinite": "skip"}, 2 + STEPS, id="skipping"),
        # GradScaler reads whether a gradient overflowed, and Handler reads the new scale.
        pytest.param({"precision": "fp16"}, 2 + 2 * STEPS, id="fp16"),
        pytest.param({"precision": "fp16", "clip_norm": 1.0}, 2 + 2 * STEPS, id="fp16, clipping"),
    ],
)
def test_waits_of_handler(options, waits):
    """Handler waits once per summary (every 10 steps), plus what the options require."""
    counts = counts_of_20_steps(**options)
    assert sum(counts[name] for name in WAITS) == waits, counts
    # A batch's two tensors come from pinned memory, and only the summary from pageable memory.
    assert counts["h2dPinned"] == 2 * STEPS
    assert counts["h2dPageable"] == counts["eventSync"]


@pytest.mark.parametrize(
    "command",
    [
        pytest.param([sys.executable, SCRIPTS / "single_gpu.py"], id="single_gpu"),
        pytest.param([sys.executable, SCRIPTS / "multigpu_spawn.py", "--nproc=1"], id="spawn"),
        pytest.param(torchrun(1, SCRIPTS / "multigpu_torchrun.py"), id="torchrun"),
        pytest.param(torchrun(1, SCRIPTS / "multinode_slurm.py"), id="slurm"),
    ],
)
def test_waits_of_the_scripts(tmp_path, command):
    """The scripts wait only for the copies of a batch's two tensors."""
    path = [str(ROOT / "tests" / "fakegpu" / "count_waits"), os.environ["PYTHONPATH"]]
    env = {"PYTHONPATH": os.pathsep.join(path)}
    ended = run(*command, "--epochs", "3", cwd=tmp_path, env=env)
    assert ended.code == 0, ended.stderr
    loops = re.findall(r"(\d+) batches, (\d+) waits", ended.stdout)
    assert len(loops) == 6
    for batches, waits in loops[2:4]:  # of epoch 2: in epochs 1 and 3, DDP times some steps
        assert int(waits) == 2 * int(batches)


def test_the_check_of_all_weights_waits_once(tmp_path):
    """However many tensors the model has. Copying them to the CPU waits once per tensor."""
    model = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(30)), torch.nn.Linear(4, 2))
    handler = job(20, 10, model=model, device="cuda")
    before = torch._fake_counts()
    handler.save(tmp_path / "a.pt")
    after = torch._fake_counts()
    tensors = 2 * 31 + 2  # weights and biases, the loss totals and the random state
    assert sum(after[name] - before[name] for name in WAITS) <= tensors + 1


def test_mig_slices_of_one_card_run_on_the_cpu(tmp_path):
    """They have different UUIDs but share a PCI address, so NCCL refuses to connect them."""
    (tmp_path / "ranks.py").write_text(
        "from ddp_ref import initialize_ddp; print(initialize_ddp().device)"
    )
    env = {"FAKE_MIG": "1", "FAKE_GPUS": "2"}
    ended = run(*torchrun(2, tmp_path / "ranks.py"), cwd=tmp_path, env=env)
    assert ended.stdout.split() == ["cpu", "cpu"]
    warning = "1 GPU for 2 ranks (2 MIG slices of the same cards, which NCCL cannot use together)"
    assert ended.stderr.count(warning) == 1, ended.stderr


PAGE = "# A page\n<!-- begin of the report -->\nold\n<!-- end of the report -->\nThe rest.\n"


@pytest.mark.skipif(torch.cuda.device_count() > 1, reason="slow, so it runs with one fake GPU only")
def test_the_report_is_written_into_the_page(tmp_path):
    """Every part except Tests, which would run the tests of test_gpu.py again."""
    page = tmp_path / "page.md"
    page.write_text(PAGE)
    parts = ["Doctor", "Waits", "Ranks", "Speed"]
    command = [sys.executable, ROOT / "benchmarks" / "gpu_report.py", *parts]
    ended = run(*command, "--page", page, "--rounds=1", cwd=tmp_path)
    assert ended.code == 0, ended.stdout + ended.stderr
    text = page.read_text()
    assert (
        text.startswith("# A page\n") and text.endswith("\nThe rest.\n") and "\nold\n" not in text
    )
    assert re.findall(r"### (\w+)\n\n\d+ s, passed", text) == parts
    assert (
        "x FakeGPU with 16 GiB" in text and "no operation waited for the GPU in 10 steps on" in text
    )
    assert "| Handler |" in text and "characters a second" in text


VALIDATE = """
import torch
from torch import nn
from training_job import Points, job
from ddp_ref import initialize_ddp

info = initialize_ddp(use_distributed=True)
layers = [layer for _ in range(10) for layer in (nn.Linear(4, 4), nn.BatchNorm1d(4))]
handler = job(40, 4, model=nn.Sequential(*layers, nn.Linear(4, 2)), device="cuda")
handler.set_val_loader(Points(8), 4)
handler.validate()
before = torch._fake_counts()["nccl"]
handler.validate()
if info.rank == 0:
    print(torch._fake_counts()["nccl"] - before)
"""


def test_validation_sends_the_buffers_of_a_dtype_at_once(tmp_path):
    """30 buffers of two dtypes are two messages; the third has the losses."""
    (tmp_path / "validate.py").write_text(VALIDATE)
    path = [str(ROOT / "tests"), os.environ["PYTHONPATH"]]
    env = {"PYTHONPATH": os.pathsep.join(path)}
    ended = run(*torchrun(torch.cuda.device_count(), "validate.py"), cwd=tmp_path, env=env)
    assert (ended.stdout, ended.code) == ("3\n", 0), ended.stderr
