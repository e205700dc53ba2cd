"""Tests that need the fake GPU: how often training waits, the watchdog, and the GPU report."""

import os
import re
import sys
from datetime import timedelta

import pytest
import torch
from harness import ROOT, Running, run, torchrun, wait_until
from test_find_hang import FIND_HANG, FREEZE
from training_job import job

from ddp_ref import Callback, initialize_ddp, run_ranks

if "FAKE_GPUS" not in os.environ or not torch.cuda.device_count():
    pytest.skip("needs the fake GPU, and -m gpu: make test-fakegpu", allow_module_level=True)

pytestmark = pytest.mark.gpu
WAITS = ("streamSync", "eventSync", "deviceSync", "memcpySync")
STEPS = 20
GPUS = torch.cuda.device_count()
LIMIT = timedelta(minutes=3)
NCCL2 = os.environ.get("TORCH_DIST_USE_NCCL2") == "1"  # PyTorch 2.14's new NCCL group
old_group = pytest.mark.skipif(NCCL2, reason="about the errors and the log of the old NCCL group")


class Counts(Callback):
    """Keep the counters after each step."""

    def __init__(self):
        self.after = []

    def on_step_end(self):
        self.after.append(torch._fake_counts())


def counts_of_20_steps(**options):
    """Return how often steps 21 to 40 wait, and copy from pinned and from pageable memory."""
    counts = Counts()
    job(1800, 10, device="cuda", callbacks=[counts], **options).train(1)  # 45 steps on 4 ranks
    before, after = counts.after[STEPS - 1], counts.after[2 * STEPS - 1]
    grown = {name: after[name] - before[name] for name in after}
    return sum(grown[name] for name in WAITS), grown["h2dPinned"], grown["h2dPageable"]


@pytest.mark.parametrize(
    ("options", "waits"),
    [
        pytest.param({}, 2, id="fp32"),
        pytest.param({"sync_every": 5}, 4, id="sync_every=5"),
        pytest.param({"precision": "bf16", "clip_norm": 1.0}, 2, id="bf16 with clipping"),
        pytest.param({"metrics": {"mean": lambda out, _: out.mean()}}, 2, id="a metric"),
        pytest.param({"on_nonfinite": "skip"}, 2 + STEPS, id="skipping"),
        # GradScaler reads whether a gradient overflowed, and Handler reads the new scale.
        pytest.param({"precision": "fp16"}, 2 + 2 * STEPS, id="fp16"),
        pytest.param({"precision": "fp16", "clip_norm": 1.0}, 2 + 2 * STEPS, id="fp16, clipping"),
        # A fused optimizer checks for overflow on the GPU.
        pytest.param({"precision": "fp16", "fused": True}, 2 + STEPS, id="fp16, fused"),
    ],
)
def test_waits_of_handler(options, waits):
    """Handler waits once per exchange (every 10 steps), plus what the options require."""
    assert counts_of_20_steps(**options) == (waits, 2 * STEPS, 0)  # a batch's two tensors


def test_waits_of_handler_under_a_group():
    """Other ranks add no wait. With `count`, the sum over the ranks adds no copy either."""

    def work():
        initialize_ddp(use_distributed=True)
        return counts_of_20_steps(), counts_of_20_steps(count=lambda batch: len(batch[1]))

    counts = run_ranks(work, nproc=GPUS, timeout=LIMIT)
    assert counts[0] == ((2, 2 * STEPS, 0),) * 2


PAGE = "# A page\n<!-- begin of the report -->\nold\n<!-- end of the report -->\nThe rest.\n"


@pytest.mark.first
@pytest.mark.skipif(GPUS > 1, reason="slow, so it runs with one fake GPU only")
def test_the_report_is_written_into_the_page(tmp_path):
    """Every part except Tests and Ranks, which would run the tests of test_gpu.py again."""
    page = tmp_path / "page.md"
    page.write_text(PAGE)
    parts = ["Doctor", "Speed"]
    command = [sys.executable, ROOT / "benchmarks" / "gpu_report.py", *parts]
    ended = run(*command, "--page", page, "--rounds=1", cwd=tmp_path, timeout=540)
    assert ended.code == 0, ended.stdout + ended.stderr
    text = page.read_text()
    assert text.startswith("# A page\n") and text.endswith("\nThe rest.\n")
    assert re.findall(r"### (\S+)\n\n\d+ s, passed", text) == parts and "\nold\n" not in text
    assert "x FakeGPU with 16 GiB" in text
    for table in ("five layers, 1 GPU", "char_gpt.py, 1 GPU", "a tiny GPT, 1 GPU"):
        assert f"| a step of {table} | median |" in text
    assert text.count("| Handler |") == 3 and "tokens a second" in text


NOT_CALLED = (
    "verdict: the others wait for rank 1, which has not called collective 3; its last was 2"
)
READS_TOO_LONG = """\
# train.py
import os
import time
from datetime import timedelta

import torch
import torch.distributed as dist


def read_batch(step):
    if dist.get_rank() == 1 and step == 2:
        time.sleep(600)  # a file server that does not answer
    return torch.ones(1_000_000, device="cuda")


device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
torch.cuda.set_device(device)
dist.init_process_group("nccl", device_id=device, timeout=timedelta(seconds=15))
for step in range(4):
    batch = read_batch(step)
    dist.all_reduce(batch)
    time.sleep(1)  # the rest of the step
time.sleep(600)  # on a real GPU, Python would wait for the result here
"""


def hanging(tmp_path, **variables):
    """Return an environment with hang.c, which keeps a collective from completing."""
    hang = tmp_path / "hang.so"
    command = ["gcc", "-shared", "-fPIC", ROOT / "tests" / "fakegpu" / "hang.c", "-o", hang, "-ldl"]
    assert run(*command, cwd=tmp_path).code == 0
    return {"LD_PRELOAD": f"{hang}:{os.environ['LD_PRELOAD']}"} | variables


@old_group
@pytest.mark.skipif(GPUS != 4, reason="three ranks: runs with four fake GPUs only")
def test_the_watchdogs_log_names_the_rank_that_the_others_wait_for(tmp_path):
    """So do its dumps, and the log on the page, which PyTorch's own watchdog has written too."""
    script = tmp_path / "train.py"
    script.write_text(READS_TOO_LONG)
    (tmp_path / "dumps").mkdir()
    env = hanging(tmp_path, HANG_AFTER="2")
    env |= {"TORCH_FR_BUFFER_SIZE": "2000", "TORCH_NCCL_DUMP_ON_TIMEOUT": "1"}
    env |= {"TORCH_FR_DUMP_TEMP_FILE": f"{tmp_path}/dumps/rank_"}
    with Running(*torchrun(3, script), cwd=tmp_path, env=env, fresh=True) as running:
        for rank in range(3):
            running.wait_for(f"Rank {rank}] ProcessGroupNCCL preparing to dump", 180)
        # A rank that another one signaled may log its own stack trace later.
        wait_until(lambda: running.text().count("Stack trace of the failed collective") == 2)
        dumps = [*FIND_HANG, "dumps"]  # the last one may not be complete at once
        wait_until(lambda: NOT_CALLED in run(*dumps, cwd=tmp_path).stdout)
    page = (ROOT / "docs" / "nccl-hangs.md").read_text()
    (tmp_path / "shown.txt").write_text(page[page.index("[rank0]:[E") :].partition("```")[0])
    for file in ("shown.txt", running.err):
        assert NOT_CALLED in run(*FIND_HANG, file, cwd=tmp_path).stdout


@pytest.mark.skipif(GPUS != 2, reason="two ranks: runs with two fake GPUs only")
def test_a_stack_does_not_show_what_the_gpu_waits_in(tmp_path):
    """find_hang.py says so, even with gloo. The fake NCCL polls, which looks like progress."""
    (tmp_path / "freeze.py").write_text(FREEZE)
    command = torchrun(2, "freeze.py", "RANK", "WORLD_SIZE", restarts=1)
    with Running(*command, cwd=tmp_path, fresh=True) as running:
        running.wait_for("rank 1 freezes", 180)
        found = run(*FIND_HANG, cwd=tmp_path).stdout
        running.kill()
    assert re.search(r"rank 0 waits in all_reduce \(Python runs ahead.*\): freeze.py:16", found)
    assert "the others wait for rank 1, which stands still: freeze.py:8" in found
