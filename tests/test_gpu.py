"""GPU tests: `make gpu-report` runs them on real GPUs, `make test-fakegpu` on fake ones."""

import sys

import pytest
import torch
import torch.distributed as dist
from harness import SCRIPTS, run, torchrun
from rank_checks import check_passes, checks, on_ranks
from training_job import Points, flat, job, network

from ddp_ref import ParallelExecutor, initialize_ddp, parallel_on_all_devices, run_ranks

GPUS = torch.cuda.device_count()
if GPUS == 0:
    why = "no CUDA device is visible; without -m gpu, pytest hides them"
    pytest.skip(why, allow_module_level=True)

pytestmark = pytest.mark.gpu
two_gpus = pytest.mark.skipif(GPUS < 2, reason=f"needs 2 CUDA devices, there are {GPUS}")


def run_cleanly(*command, cwd, **options):
    """Run a command; fail if it exits with an error, or if PyTorch warns about how it uses NCCL."""
    ended = run(*command, cwd=cwd, **options)
    assert ended.code == 0, ended.stdout + ended.stderr
    # parts of the warnings about an open group, blocking sends and a guessed device
    for warning in ("destroy_process_group", "unbatched P2P", "using GPU", "barrier"):
        assert warning not in ended.stderr, ended.stderr
    return ended.stdout + ended.stderr


def command(script, nproc=GPUS):
    """Return the command that starts a script in `nproc` processes."""
    path = SCRIPTS / f"{script}.py"
    if script == "single_gpu":
        return [sys.executable, path]
    if script in ("multigpu_spawn", "char_gpt"):
        return [sys.executable, path, "--nproc", str(nproc)]
    return torchrun(nproc, path)


WITH_RANKS = ["multigpu_spawn", "multigpu_torchrun", "multinode_slurm", "train_reference"]


@pytest.mark.parametrize("script", ["single_gpu", *WITH_RANKS])
def test_the_scripts_train_on_gpus(tmp_path, script):
    effective_batch = ["--batch_size", str(max(1, 32 // GPUS))]  # 32 on any number of GPUs
    text = run_cleanly(*command(script), "3", *effective_batch, cwd=tmp_path)
    assert "device: cuda" in text
    accuracies = [float(line.split()[-1]) for line in text.splitlines() if "test accuracy" in line]
    assert accuracies[-1] > 0.9
    (checkpoint,) = tmp_path.rglob("*.pt")
    assert b"cuda:" not in checkpoint.read_bytes()  # torch.load needs no map_location


@pytest.mark.parametrize("script", WITH_RANKS)
def test_more_processes_than_gpus(tmp_path, script):
    """They train on the CPU and say so."""
    text = run_cleanly(*command(script, GPUS + 1), "1", cwd=tmp_path)
    assert f"device: cpu ({GPUS} GPU{'s' * (GPUS > 1)} for {GPUS + 1} processes)" in text


SMALL = ["--n-layer=1", "--n-embd=16", "--block-size=512", "--epochs=1", "--length=40"]
CONFIG = ["--config", SCRIPTS / "configs" / "digits.yaml", "--set", "training.num_epochs=1"]


@pytest.mark.parametrize(
    ("script", "arguments", "shown"),
    [
        ("minimal_ddp", [], f"all {GPUS} processes on cuda hold the same weights"),
        ("char_gpt", SMALL, f"ranks: {GPUS} | device: cuda:0 | precision: "),
        ("train_from_yaml", CONFIG, "test accuracy"),
    ],
)
def test_the_other_scripts_run_on_gpus(tmp_path, script, arguments, shown):
    assert shown in run_cleanly(*command(script), *arguments, cwd=tmp_path)


def gpu_job(**options):
    return job(200, 10, device="cuda", **options)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_train_validate_predict_and_resume(precision, tmp_path):
    options = {"precision": precision, "accumulate": 3, "clip_norm": 1.0}
    handler = gpu_job(model=network(dropout=0.1), **options)
    handler.set_val_loader(Points(50), 10)
    handler.train(3)
    assert handler.train_losses[-1] < handler.train_losses[0]
    accuracy = handler.val_metrics["accuracy"][-1]
    assert handler.validate() == {"loss": handler.val_losses[-1], "accuracy": accuracy}
    outputs = handler.predict(Points(50), 10)
    assert outputs.shape == (50, 2) and outputs.device.type == "cpu"
    handler.save(tmp_path / "a.pt")
    assert b"cuda:0" not in (tmp_path / "a.pt").read_bytes()  # torch.load needs no map_location
    handler.train(4)
    resumed = gpu_job(model=network(dropout=0.1), **options)  # the GPU's random state is another
    resumed.load(tmp_path / "a.pt")
    resumed.train(4)
    torch.testing.assert_close(flat(resumed.model), flat(handler.model))


def test_a_checkpoint_moves_from_gpu_to_cpu_and_back(tmp_path):
    moved, handler = gpu_job(), gpu_job()
    moved.train(1)
    for epochs, device in ((2, "cpu"), (3, "cuda")):
        moved.save(tmp_path / "a.pt")
        moved = job(200, 10, device=device)
        moved.load(tmp_path / "a.pt")
        moved.train(epochs)
    handler.train(3)
    torch.testing.assert_close(flat(moved.model), flat(handler.model))


@two_gpus
def test_a_handler_on_cuda_1_sets_the_current_device():
    try:
        handler = job(20, 3, device="cuda:1")
        handler.train(1)
        assert torch.cuda.current_device() == 1
        assert next(handler.model.parameters()).device == torch.device("cuda:1")
        assert initialize_ddp().device == torch.device("cuda:1")
    finally:
        torch.cuda.set_device(0)


LAUNCHES = [on_ranks("gpu_checks.py", GPUS)]
if GPUS == 1:
    LAUNCHES.append(on_ranks("gpu_checks.py", 2, "--share-gpus"))


@pytest.mark.parametrize("name", checks("gpu_checks.py"))
@pytest.mark.parametrize("launch", LAUNCHES)
def test_on_ranks(launch, name):
    check_passes(launch, name)


def test_each_worker_uses_its_own_gpu():
    with ParallelExecutor() as executor:
        results = executor.run(lambda device: torch.arange(3, device=device) * 2)
        assert [result.device.index for result in results] == [*range(GPUS)]
        assert executor.run(lambda device: torch.cuda.current_device()) == [*range(GPUS)]
        ones = torch.ones(2).cuda()
        arguments = executor.run(lambda device, x: (x.device == device, x.tolist()), ones)
        assert arguments == [(True, [1.0, 1.0])] * GPUS
    batch = torch.randn(8, 3, device="cuda:0")
    assert torch.equal(parallel_on_all_devices(lambda chunk: chunk * 2)(batch), batch * 2)


def test_run_ranks():
    def work(start):
        info = initialize_ddp(use_distributed=True)
        total = start.to(info.device) + info.rank
        dist.all_reduce(total)
        return info.device.type, total.item()

    total = 10 * GPUS + sum(range(GPUS))
    assert run_ranks(work, torch.tensor(10), nproc=GPUS) == [("cuda", total)] * GPUS
