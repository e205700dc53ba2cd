"""What needs a GPU: run by `pytest -m gpu` where there is one, by `make test-fakegpu` anywhere."""

import json
import os
import sys

import pytest
import torch
from harness import ROOT, SCRIPTS, run, torchrun
from rank_checks import check_passes, checks, on_ranks
from torch import nn
from training_job import Points, flat, job, network

from ddp_ref import Handler, ParallelExecutor, parallel_on_all_devices, run_ranks

GPUS = torch.cuda.device_count()
if GPUS == 0:
    pytest.skip("needs a GPU; on a fake one: make test-fakegpu", allow_module_level=True)

pytestmark = pytest.mark.gpu
two_gpus = pytest.mark.skipif(GPUS < 2, reason=f"needs 2 CUDA devices, there are {GPUS}")


# ---------------------------------------------------------------- the scripts


def finished(*command, cwd, **options):
    """Run a command to its end, without an error and without a complaint of nccl's."""
    ended = run(*command, cwd=cwd, **options)
    assert ended.code == 0, ended.stdout + ended.stderr
    for complaint in ("destroy_process_group", "unbatched P2P", "using GPU", "barrier"):
        assert complaint not in ended.stderr, ended.stderr
    return ended.stdout + ended.stderr


def launch(script, name):
    """Return the command that starts a script on all GPUs."""
    if script in ("single_gpu", "minimal_ddp") and name == "alone":
        return [sys.executable, SCRIPTS / f"{script}.py"]
    if name == "spawn":
        return [sys.executable, SCRIPTS / f"{script}.py", "--nproc", str(GPUS)]
    return torchrun(GPUS, SCRIPTS / f"{script}.py")


@pytest.mark.parametrize(
    ("script", "name"),
    [
        ("single_gpu", "alone"),
        ("multigpu_spawn", "spawn"),
        ("multigpu_torchrun", "torchrun"),
        ("multinode_slurm", "torchrun"),
    ],
)
def test_the_ladder(tmp_path, script, name):
    text = finished(*launch(script, name), "--epochs", "3", cwd=tmp_path)
    assert "running on CUDA" in text
    accuracies = [float(line.split()[-1]) for line in text.splitlines() if "test accuracy" in line]
    assert accuracies[-1] > 0.9


def test_a_snapshot_is_loaded_on_a_machine_without_gpus(tmp_path):
    flags = ["--epochs", "2"]
    finished(*torchrun(GPUS, SCRIPTS / "multigpu_torchrun.py"), *flags, cwd=tmp_path)
    cpu = {"CUDA_VISIBLE_DEVICES": ""}
    flags = ["--epochs", "3"]
    text = finished(
        *torchrun(GPUS, SCRIPTS / "multigpu_torchrun.py"), *flags, cwd=tmp_path, env=cpu
    )
    assert "running on the CPU" in text and "epoch 3" in text and "epoch 2" not in text


@pytest.mark.parametrize("name", ["alone", "torchrun"])
def test_the_smallest_script(tmp_path, name):
    text = finished(*launch("minimal_ddp", name), cwd=tmp_path)
    assert f"all {1 if name == 'alone' else GPUS} processes on cuda hold the same weights" in text
    assert torch.load(tmp_path / "minimal.pt", weights_only=True)["0.weight"].device.type == "cpu"


@pytest.mark.parametrize("name", ["spawn", "torchrun"])
def test_the_reference(tmp_path, name):
    config = ["--config", SCRIPTS / "configs" / "digits.yaml", "--set", "training.num_epochs=2"]
    finished(*launch("train_reference", name), *config, cwd=tmp_path)
    settings = json.loads((tmp_path / "runs" / "digits" / "config.json").read_text())
    assert (settings["device"], settings["world_size"]) == ("cuda:0", GPUS)


@pytest.mark.parametrize("name", ["spawn", "torchrun"])
def test_the_character_model(tmp_path, name):
    small = ["--n-layer", "1", "--n-head", "2", "--n-embd", "16", "--block-size", "512"]
    text = finished(
        *launch("char_gpt", name), *small, "--epochs", "1", "--length", "40", cwd=tmp_path
    )
    assert f"{GPUS} x cuda:0 in bf16" in text or f"{GPUS} x cuda:0 in fp16" in text


# ---------------------------------------------------------------- Handler alone


def on_gpu(**options):
    return job(200, 10, device="cuda", **options)


SETTINGS = {
    "plain": {},
    "clipped": {"clip_norm": 1.0},
    "accumulated": {"accumulate": 3, "clip_norm": 1.0},
    "skipping": {"on_nonfinite": "skip"},
    "counted": {"count": lambda batch: len(batch[1])},
}


@pytest.mark.parametrize("settings", [*SETTINGS])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_precisions(precision, settings, tmp_path):
    handler = on_gpu(precision=precision, **SETTINGS[settings])
    handler.set_val_loader(Points(50), 10)
    handler.train(3)
    assert handler.train_losses[-1] < handler.train_losses[0]
    assert handler.validate() == {"loss": handler.val_losses[-1], **last(handler.val_metrics)}
    outputs = handler.predict(Points(50), 10)
    assert outputs.shape == (50, 2) and outputs.device.type == "cpu"
    handler.save(tmp_path / "a.pt")
    resumed = on_gpu(precision=precision, **SETTINGS[settings])
    resumed.load(tmp_path / "a.pt")
    assert torch.equal(flat(resumed.model), flat(handler.model))
    for each in (handler, resumed):
        each.train(4)
    torch.testing.assert_close(flat(resumed.model), flat(handler.model))


def last(lists):
    return {name: values[-1] for name, values in lists.items()}


def test_a_step_whose_gradients_overflow_is_skipped():
    handler = on_gpu(precision="fp16")
    handler.optimizer_step.scaler = torch.amp.GradScaler(init_scale=2.0**127)
    before = flat(handler.model)
    handler.train(1)
    assert handler.skipped == handler.step == 20
    assert torch.equal(flat(handler.model), before)


def test_a_loaded_scale_is_not_taken_for_an_overflow(tmp_path):
    """A smaller scale after a step says that the step was skipped, after a load it does not."""
    other = on_gpu(precision="fp16")
    other.optimizer_step.scaler = torch.amp.GradScaler(init_scale=2.0**4)
    other.train(1)
    other.save(tmp_path / "a.pt")
    handler = on_gpu(precision="fp16")
    handler.train(1)
    handler.load(tmp_path / "a.pt")
    handler.train(2)
    assert handler.step == 40 and handler.skipped == 0


def test_from_a_gpu_to_the_cpu_and_back(tmp_path):
    handler = on_gpu()
    handler.train(1)
    handler.save(tmp_path / "gpu.pt")
    body = """
import sys
from training_job import job
handler = job(200, 10)
handler.load("gpu.pt")
handler.train(2)
handler.save("cpu.pt")
print(handler.device, handler.epoch)
"""
    (tmp_path / "cpu.py").write_text(body)
    path = os.pathsep.join([str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")])
    env = {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": path}
    assert "cpu 2" in finished(sys.executable, "cpu.py", cwd=tmp_path, env=env)
    back = on_gpu()
    back.load(tmp_path / "cpu.pt")
    back.train(3)
    handler.train(3)
    torch.testing.assert_close(flat(back.model), flat(handler.model))


def test_adagrad_and_a_checkpoint_for_any_machine(tmp_path):
    """Adagrad creates its state with the optimizer, so on the CPU."""
    model = network()
    optimizer = torch.optim.Adagrad(model.parameters())
    handler = Handler(model, optimizer, nn.functional.cross_entropy, device="cuda")
    handler.set_train_loader(Points(20), 3)
    handler.train(1)
    assert all(state["sum"].device.type == "cuda" for state in optimizer.state.values())
    handler.save(tmp_path / "a.pt")
    saved = torch.load(tmp_path / "a.pt", weights_only=True)  # no map_location
    parts = [*saved["model"].values(), *(s["sum"] for s in saved["optimizer"]["state"].values())]
    assert all(part.device.type == "cpu" for part in parts)


def test_batches_are_pinned_unless_the_user_says_no():
    handler = on_gpu()
    assert handler.train_loader.pin_memory
    assert all(part.is_pinned() for part in next(iter(handler.train_loader)))
    handler.set_train_loader(Points(20), 3, pin_memory=False)
    assert not handler.train_loader.pin_memory
    handler.set_val_loader(Points(20), 3)
    assert handler.val_loader.pin_memory
    handler.set_train_loader(torch.utils.data.DataLoader(Points(20), 3))  # as the user made it
    assert not handler.train_loader.pin_memory


@two_gpus
def test_a_handler_on_the_second_gpu_makes_it_current():
    try:
        handler = job(20, 3, device="cuda:1")
        handler.train(1)
        assert torch.cuda.current_device() == 1
        assert next(handler.model.parameters()).device == torch.device("cuda:1")
    finally:
        torch.cuda.set_device(0)


def test_a_gpu_that_only_emulates_bfloat16_is_refused(monkeypatch):
    monkeypatch.setattr(
        torch.cuda, "is_bf16_supported", lambda including_emulation=True: including_emulation
    )
    with pytest.raises(ValueError, match="has no bfloat16"):
        on_gpu(precision="bf16")


# ---------------------------------------------------------------- ranks


@pytest.mark.parametrize("name", checks("gpu_checks.py"))
@pytest.mark.parametrize("launch", [on_ranks("gpu_checks.py", max(GPUS, 1))])
def test_on_ranks(launch, name):
    check_passes(launch, name)


ONE_LINE = """
import sys
import torch.distributed as dist
from ddp_ref import initialize_ddp
info = initialize_ddp(use_distributed=True)
sys.stdout.write(f"{info.rank} on {info.device} by {dist.get_backend()}\\n")
sys.stdout.flush()
"""


def devices_of(tmp_path, nproc, body=ONE_LINE, **env):
    """Start ranks; return what they print, sorted, and what they complain about."""
    (tmp_path / "ranks.py").write_text(body)
    ended = run(*torchrun(nproc, tmp_path / "ranks.py"), cwd=tmp_path, env=env)
    return sorted(ended.stdout.split("\n"))[1:], ended.stderr, ended.code


def test_a_rank_that_forgets_to_clean_up_ends_without_a_complaint(tmp_path):
    shown, errors, code = devices_of(tmp_path, GPUS)
    assert shown == [f"{rank} on cuda:{rank} by nccl" for rank in range(GPUS)]
    assert code == 0 and "destroy_process_group" not in errors, errors


def test_more_ranks_than_gpus(tmp_path):
    shown, errors, _ = devices_of(tmp_path, GPUS + 1)
    assert shown == [f"{rank} on cpu by gloo" for rank in range(GPUS + 1)]
    plural = "s" * (GPUS > 1)
    assert errors.count(f"{GPUS} GPU{plural} for {GPUS + 1} ranks: running on the CPU") == 1


def test_a_handler_that_wants_a_gpu_then_raises_on_all_ranks(tmp_path):
    body = """
import torch
from ddp_ref import Handler
model = torch.nn.Linear(2, 1)
Handler(model, torch.optim.SGD(model.parameters(), 0.1), torch.nn.MSELoss(), device="cuda")
"""
    _, errors, code = devices_of(tmp_path, GPUS + 1, body)
    assert code == 1
    assert errors.count("ValueError: device is cuda, but") >= GPUS + 1, errors


VISIBLE = 'import os; os.environ["CUDA_VISIBLE_DEVICES"] = WHICH\n' + ONE_LINE


@two_gpus
def test_each_rank_sees_only_its_own_gpu(tmp_path):
    """As under Slurm's --gpus-per-task=1: the index is 0 on all ranks, and the GPUs differ."""
    shown, errors, code = devices_of(
        tmp_path, 2, VISIBLE.replace("WHICH", 'os.environ["LOCAL_RANK"]')
    )
    assert shown == ["0 on cuda:0 by nccl", "1 on cuda:0 by nccl"] and code == 0, errors


@two_gpus
def test_two_ranks_see_the_same_gpu(tmp_path):
    shown, errors, _ = devices_of(tmp_path, 2, VISIBLE.replace("WHICH", '"0"'))
    assert shown == ["0 on cpu by gloo", "1 on cpu by gloo"]
    assert errors.count("1 GPU for 2 ranks: running on the CPU") == 1


# ---------------------------------------------------------------- workers and doctor


def test_each_worker_has_its_own_gpu_and_tensors_stay_there():
    with ParallelExecutor() as executor:
        results = executor.run(lambda device: torch.arange(3, device=device) * 2)
        assert [result.device.index for result in results] == [*range(GPUS)]
        assert executor.run(lambda device: torch.cuda.current_device()) == [*range(GPUS)]
        own = executor.run(lambda device, x: (x.device == device, x.cpu()), torch.ones(2).cuda())
        assert [(here, x.tolist()) for here, x in own] == [(True, [1.0, 1.0])] * GPUS
    with pytest.raises(ValueError, match=f"{GPUS} CUDA devices are visible"):
        ParallelExecutor(GPUS + 1)
    batch = torch.randn(8, 3, device="cuda:0")
    assert torch.equal(parallel_on_all_devices(lambda chunk: chunk * 2)(batch), batch * 2)


def test_run_ranks():
    def work(start):
        import torch.distributed as dist

        from ddp_ref import initialize_ddp

        info = initialize_ddp(use_distributed=True)
        total = start.to(info.device) + info.rank
        dist.all_reduce(total)
        return info.device.type, total.item()

    total = 10 * GPUS + sum(range(GPUS))
    assert run_ranks(work, torch.tensor(10), nproc=GPUS) == [("cuda", total)] * GPUS


def test_doctor(tmp_path):
    text = finished(sys.executable, "-m", "ddp_ref", "doctor", cwd=tmp_path)
    name = torch.cuda.get_device_name(0)
    assert f"{GPUS} visible GPU" in text and name in text
    assert "nccl" in text and "0 problems" in text
