"""Tests that need the fake GPU: how often training waits, MIG slices, and the GPU report."""

import os
import re
import sys
from contextlib import ExitStack
from functools import partial

import pytest
import torch
from harness import ROOT, SCRIPTS, Running, free_port, run, torchrun, wait_until
from rank_checks import checks
from training_job import job

from ddp_ref import Callback, run_ranks

if "FAKE_GPUS" not in os.environ or not torch.cuda.device_count():
    pytest.skip("needs the fake GPU, and -m gpu: make test-fakegpu", allow_module_level=True)

pytestmark = pytest.mark.gpu
WAITS = ("streamSync", "eventSync", "deviceSync", "memcpySync")
STEPS = 20
GPUS = torch.cuda.device_count()


class Counts(Callback):
    """Keep the counters after each step."""

    def __init__(self):
        self.after = []

    def on_step_end(self):
        self.after.append(torch._fake_counts())


def counts_of_20_steps(**options):
    """Return how much each counter grows during steps 21 to 40."""
    counts = Counts()
    job(1800, 10, device="cuda", callbacks=[counts], **options).train(1)  # 45 steps on 4 ranks
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
        # A fused optimizer checks for overflow on the GPU.
        pytest.param({"precision": "fp16", "fused": True}, 2 + STEPS, id="fp16, fused"),
    ],
)
def test_waits_of_handler(options, waits):
    """Handler waits once per summary (every 10 steps), plus what the options require."""
    counts = counts_of_20_steps(**options)
    assert sum(counts[name] for name in WAITS) == waits, counts
    # A batch's two tensors come from pinned memory.
    assert (counts["h2dPinned"], counts["h2dPageable"]) == (2 * STEPS, 0)


def on_all_gpus(folder, body, gpus=None):
    """Run `body` on one rank per fake GPU; it may import from tests/."""
    (folder / "ranks.py").write_text(body)
    env = {"PYTHONPATH": os.pathsep.join([str(ROOT / "tests"), os.environ["PYTHONPATH"]])}
    if gpus:
        env["FAKE_GPUS"] = str(gpus)
    ended = run(*torchrun(GPUS, "ranks.py"), cwd=folder, env=env)
    assert ended.code == 0, ended.stderr
    return ended


COUNT = """
from test_fakegpu import WAITS, counts_of_20_steps
from ddp_ref import cleanup_ddp, initialize_ddp

info = initialize_ddp(use_distributed=True)
for options in ({}, {"count": lambda batch: len(batch[1])}):
    counts = counts_of_20_steps(**options)
    if info.rank == 0:
        print(sum(counts[n] for n in WAITS), counts["h2dPinned"], counts["h2dPageable"])
cleanup_ddp()
"""


def test_waits_of_handler_under_a_group(tmp_path):
    """Other ranks add no wait. With `count`, the sum over the ranks adds no copy either."""
    ended = on_all_gpus(tmp_path, COUNT)
    assert ended.stdout.splitlines() == [f"2 {2 * STEPS} 0"] * 2, ended.stderr


SUMMARY = """
import torch
from ddp_ref import cleanup_ddp, initialize_ddp
from ddp_ref.training.rank_sync import RankSync

info = initialize_ddp(use_distributed=True)
totals = torch.zeros(1, dtype=torch.float64, device=info.device)
sync = RankSync(info.device, True)

def events():
    # Of the training stream, for tensors of more than one number.
    trace = torch.cuda.memory._snapshot()["device_traces"][info.device.index]
    ours = [e for e in trace if e["stream"] == 0 and e["size"] > 8]
    return [e["action"] for e in ours if e["action"] != "snapshot"]

sync.start(1, totals)
sync.finish()
torch.zeros(1, device=info.device)  # now the memory of this first summary is free
torch.cuda.memory._record_memory_history()
sync.start(1, totals)
started = events()
sync.reset()
if info.rank == 0:
    print(started, events())
cleanup_ddp()
"""


def test_the_memory_of_a_summary_in_flight_is_not_reused(tmp_path):
    """NCCL and a side stream still use it, so neither it nor a hidden copy of it may be freed."""
    kept, freed = ["alloc"] * 2, ["free_requested"] * 2  # but not free_completed
    ended = on_all_gpus(tmp_path, SUMMARY)
    assert ended.stdout == f"{kept} {kept + freed}\n", ended.stderr
    assert "Warning" not in ended.stderr


FOREIGN = """
import os
import torch
import torch.distributed as dist
from ddp_ref import barrier, gather_objects, on_rank

rank = int(os.environ["RANK"])
torch.cuda.set_device(GPUS - 1 - rank)
dist.init_process_group("nccl")
on_rank(0, barrier=True)(lambda: None)()
barrier()
from ddp_ref import initialize_ddp
devices = gather_objects(str(initialize_ddp().device))
if rank == 0:
    print(devices)
dist.destroy_process_group()
"""


def test_a_users_own_group_keeps_the_devices_that_the_user_set(tmp_path):
    gpus = 2 * GPUS
    ended = on_all_gpus(tmp_path, FOREIGN.replace("GPUS", str(gpus)), gpus)
    assert ended.stdout == f"{[f'cuda:{gpus - 1 - rank}' for rank in range(GPUS)]}\n"
    assert "barrier" not in ended.stderr, ended.stderr  # NCCL need not guess the GPU


def test_extra_state_on_the_cpu_is_checked_and_saved(tmp_path):
    class Counted(torch.nn.Linear):
        extra = 1.0

        def get_extra_state(self):
            return torch.tensor(self.extra)

        def set_extra_state(self, state):
            self.extra = state.item()

    model = Counted(4, 2)
    handler = job(20, 10, model=model, device="cuda")
    handler.train(1)
    handler.save(tmp_path / "a.pt")
    model.extra = float("nan")
    with pytest.raises(FloatingPointError, match="_extra_state is not finite"):
        handler.save(tmp_path / "b.pt")


@pytest.mark.parametrize(
    "command",
    [
        pytest.param([sys.executable, SCRIPTS / "single_gpu.py"], id="single_gpu"),
        pytest.param(
            [sys.executable, SCRIPTS / "multigpu_spawn.py", f"--nproc={GPUS}"], id="spawn"
        ),
        pytest.param(torchrun(GPUS, SCRIPTS / "multigpu_torchrun.py"), id="torchrun"),
        pytest.param(torchrun(GPUS, SCRIPTS / "multinode_slurm.py"), id="slurm"),
    ],
)
def test_waits_of_the_scripts(tmp_path, command):
    """They wait for the copies of a batch's two tensors, and to read an epoch's two numbers."""
    path = [str(ROOT / "tests" / "fakegpu" / "count_waits"), os.environ["PYTHONPATH"]]
    env = {"PYTHONPATH": os.pathsep.join(path)}
    ended = run(*command, "3", cwd=tmp_path, env=env)
    assert ended.code == 0, ended.stderr
    pattern = r"process (\d+): (\d+) waits, then (\d+) batches, (\d+) waits"
    ranks = {}
    for process, *counts in re.findall(pattern, ended.stdout):
        ranks.setdefault(process, []).append([int(count) for count in counts])
    assert len(ranks) == (1 if "single_gpu" in str(command) else GPUS)
    for loops in ranks.values():
        assert len(loops) == 6
        # The two loops of epoch 2: DDP times some steps of epochs 1 and 3.
        assert all(waits == 2 * batches for _, batches, waits in loops[2:4])
        assert all(between <= 2 for between, _, _ in loops[1:])


@pytest.mark.skipif(GPUS != 4, reason="needs four fake GPUs")
def test_each_task_of_srun_has_its_own_gpu(tmp_path):
    """Tasks 2 and 3 are the first two of the second node, so they take its first two GPUs."""
    env = {"SLURM_STEP_NUM_TASKS": "4", "MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port())}
    command = [sys.executable, SCRIPTS / "multinode_slurm.py", "1"]
    tasks = []
    with ExitStack() as stack:
        for rank, own in enumerate(["0", "1", "0", "1"]):
            node = {"SLURM_GTIDS": "0,1", "CUDA_VISIBLE_DEVICES": "0,1"}
            if rank >= 2:
                node = {"SLURM_GTIDS": "2,3", "CUDA_VISIBLE_DEVICES": "2,3"}
            task = env | node | {"SLURM_PROCID": str(rank), "SLURM_LOCALID": own}
            tasks.append(stack.enter_context(Running(*command, cwd=tmp_path, env=task)))
        results = [task.wait() for task in tasks]
    assert [result.code for result in results] == [0] * 4, results
    for rank, result in enumerate(results):
        assert re.search(rf"rank {rank} on \S+, 2 GPUs\n", result.stdout)


def test_mig_slices_of_one_card_run_on_the_cpu(tmp_path):
    """They have different UUIDs but share a PCI address, so NCCL refuses to connect them."""
    (tmp_path / "ranks.py").write_text(
        "import sys; from ddp_ref import initialize_ddp; "
        r"sys.stdout.write(f'{initialize_ddp().device}\n')"  # print would write twice
    )
    env = {"FAKE_MIG": "1", "FAKE_GPUS": "2"}
    ended = run(*torchrun(2, tmp_path / "ranks.py"), cwd=tmp_path, env=env)
    assert ended.stdout.split() == ["cpu", "cpu"]
    warning = "1 GPU for 2 ranks (2 MIG slices of the same cards, which NCCL cannot use together)"
    assert ended.stderr.count(warning) == 1, ended.stderr


PAGE = "# A page\n<!-- begin of the report -->\nold\n<!-- end of the report -->\nThe rest.\n"


@pytest.mark.skipif(GPUS > 1, reason="slow, so it runs with one fake GPU only")
def test_the_report_is_written_into_the_page(tmp_path):
    """Every part except Tests, which would run the tests of test_gpu.py again."""
    page = tmp_path / "page.md"
    page.write_text(PAGE)
    parts = ["Doctor", "Waits", "Ranks", "Speed", "GPT-2"]
    command = [sys.executable, ROOT / "benchmarks" / "gpu_report.py", *parts]
    ended = run(*command, "--page", page, "--rounds=1", cwd=tmp_path, timeout=540)
    assert ended.code == 0, ended.stdout + ended.stderr
    text = page.read_text()
    assert (
        text.startswith("# A page\n") and text.endswith("\nThe rest.\n") and "\nold\n" not in text
    )
    assert re.findall(r"### (\S+)\n\n\d+ s, passed", text) == parts
    assert "x FakeGPU with 16 GiB" in text and "no hidden wait for the GPU in 10 steps on" in text
    assert "It ran on one rank, and on two ranks that share the GPU." in text
    assert f"{2 * len(checks('gpu_checks.py'))} passed" in text
    assert "| Handler |" in text and "characters a second" in text
    assert "a step of a tiny GPT, 4 x 32 tokens" in text and "Left out: compiled" in text


def one_bit_off(loop):
    """Return `loop`, which then changes the last bit of a weight."""

    def train(*args):
        loop(*args)
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
        assert torch.are_deterministic_algorithms_enabled()
        model, *_ = args[-3:]
        weight = next(model.parameters()).data.view(-1)[:1]
        weight.copy_(torch.nextafter(weight, torch.full_like(weight, torch.inf)))

    return train


@pytest.mark.skipif(GPUS > 1, reason="slow, so it runs with one fake GPU only")
@pytest.mark.parametrize("changed", ["small", "char_gpt"])
def test_on_gpus_weights_are_compared_bit_for_bit_with_deterministic_kernels(monkeypatch, changed):
    import finale  # not above: some ranks import this module, but have no benchmarks/ on their path
    import gpu
    import steps

    def on_rank(work, *args, **options):
        gpu.WIDTH, finale.BATCH["cuda"] = 8, 2  # quick on a CPU
        if changed == "small":
            steps.LOOPS[steps.OURS] = one_bit_off(steps.handler)
        else:
            finale.with_handler = one_bit_off(finale.with_handler)
        return work(*args, **options)

    monkeypatch.setattr(gpu, "run_ranks", partial(run_ranks, on_rank))
    with pytest.raises(AssertionError, match="Handler has trained another model"):
        gpu.measure(1)


SIGNALS = "First PG on this rank to signal dumping|Observed flight recorder dump signal"


def on_the_page(pattern):
    """Return the part of docs/nccl-hangs.md that `pattern` finds."""
    found = re.search(pattern, (ROOT / "docs" / "nccl-hangs.md").read_text(), re.DOTALL)
    assert found, pattern
    return found[1]


def lines_of(rank, log):
    """Return the set of the lines that a rank logs, and the set of those of stacks.

    The lines of stacks name no rank, and two ranks log the same ones.

    Times, paths and which rank signaled first are removed, because they differ from run to run,
    and the end of PyTorch's standard advice, which the page shortens.
    """
    text = re.sub(r"E\d{4} [\d:.]+|\d+(?= milliseconds)| from .*/", "", log)
    text = re.sub(r"(?<=incorrect usages of collectives, ).*", "", text)
    text = re.sub(r"(?<=timeout from )(this local rank|\s+rank \d)", "", text)
    lines = [line.rstrip() for line in text.splitlines() if not re.search(SIGNALS, line)]
    stacks = {line for line in lines if line.startswith("#")}
    return {line for line in lines if line.startswith(f"[rank{rank}]:[")}, stacks


FIND_HANG = SCRIPTS / "find_hang.py"
NOT_CALLED = (
    "verdict: the others wait for rank 1, which has not called collective 3; its last was 2"
)
FREEZE = """
import time, torch, torch.distributed as dist
dist.init_process_group("gloo")
dist.all_reduce(torch.ones(4))
if dist.get_rank() == 1:
    print("rank 1 freezes", flush=True)
    time.sleep(600)
dist.all_reduce(torch.ones(4))
"""
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


@pytest.mark.skipif(GPUS != 4, reason="three ranks: runs with four fake GPUs only")
def test_the_watchdogs_log_is_the_one_on_the_page(tmp_path):
    """PyTorch's own watchdog logs it; hang.c only keeps a collective from completing.

    The page shows enough of the lines for find_hang.py.
    """
    hang = tmp_path / "hang.so"
    command = ["gcc", "-shared", "-fPIC", ROOT / "tests" / "fakegpu" / "hang.c", "-o", hang, "-ldl"]
    assert run(*command, cwd=tmp_path).code == 0
    script, shown = tmp_path / "train.py", on_the_page(r"```text\n(\[rank0\]:.*?)```")
    script.write_text(READS_TOO_LONG)
    (tmp_path / "dumps").mkdir()
    env = {"LD_PRELOAD": f"{hang}:{os.environ['LD_PRELOAD']}", "HANG_AFTER": "2"}
    env |= {"TORCH_FR_BUFFER_SIZE": "2000", "TORCH_NCCL_DUMP_ON_TIMEOUT": "1"}
    env |= {"TORCH_FR_DUMP_TEMP_FILE": f"{tmp_path}/dumps/rank_"}
    with Running(*torchrun(3, script), cwd=tmp_path, env=env, fresh=True) as running:
        for rank in range(3):
            running.wait_for(f"Rank {rank}] ProcessGroupNCCL preparing to dump", 180)
        # A rank that another one signaled may log its own stack trace later.
        wait_until(lambda: running.text().count("Stack trace of the failed collective") == 2)
        printed = running.text()
        dumps = [sys.executable, FIND_HANG, "dumps"]  # the last one may not be complete at once
        wait_until(lambda: NOT_CALLED in run(*dumps, cwd=tmp_path).stdout)
    for rank in (0, 1):
        own, stack = lines_of(rank, shown)
        assert own and own <= lines_of(rank, printed)[0]
    assert len(stack) == 3 and lines_of(0, printed)[1] == stack
    for log in (shown, printed):
        assert re.search(r"Rank [02]\] First PG on this rank to signal dumping", log)
        assert "Rank 1] Observed flight recorder dump signal from another rank" in log
    (tmp_path / "shown.txt").write_text(shown)
    for log in ("shown.txt", running.err):
        assert NOT_CALLED in run(sys.executable, FIND_HANG, log, cwd=tmp_path).stdout


@pytest.mark.skipif(GPUS != 2, reason="two ranks: runs with two fake GPUs only")
def test_a_stack_does_not_show_what_the_gpu_waits_in(tmp_path):
    """find_hang.py says so, even with gloo. The fake NCCL polls, which looks like progress."""
    (tmp_path / "freeze.py").write_text(FREEZE)
    with Running(*torchrun(2, "freeze.py"), cwd=tmp_path, fresh=True) as running:
        running.wait_for("rank 1 freezes", 180)
        found = run(sys.executable, FIND_HANG, cwd=tmp_path).stdout
        running.kill()
    assert re.search(r"rank 0 waits in all_reduce \(Python runs ahead.*\): freeze.py:8", found)
    assert "the others wait for rank 1, which stands still: freeze.py:7" in found
