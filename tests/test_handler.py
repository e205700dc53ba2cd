"""Handler on real ranks.

It ends with the weights of a plain DDP loop and reports the numbers of one process, and all ranks
take the same decisions.
"""

import os
import re
import signal
from datetime import timedelta
from unittest.mock import Mock

import handler_checks
import pytest
import torch
from harness import TESTS, run, torchrun
from rank_checks import check_passes, checks, on_ranks
from torch import nn
from training_job import Points, accuracy, flat, job, network

from ddp_ref import Callback, run_ranks
from ddp_ref.model import move
from ddp_ref.signals import caught_signals

SCRIPT = "handler_checks.py"
LIMIT = timedelta(minutes=4)
CPU = torch.device("cpu")


@pytest.mark.parametrize("name", checks(SCRIPT))
# Fresh, because torch's profiler hangs in a forked process if torch was built for CUDA.
@pytest.mark.parametrize("launch", [on_ranks(SCRIPT, 3, fresh=True)])
def test_on_ranks(name, launch):
    check_passes(launch, name)


@pytest.mark.parametrize("name", checks(SCRIPT))
def test_in_one_process(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    getattr(handler_checks, name)()


def test_two_ranks_resume_bit_for_bit(tmp_path, monkeypatch):
    check = handler_checks.check_a_run_resumed_at_any_step_equals_the_uninterrupted_run
    monkeypatch.chdir(tmp_path)
    run_ranks(check, nproc=2, timeout=LIMIT)


class Spoils(Callback):
    def on_validation_start(self):
        with torch.no_grad():
            self.handler.model[0].bias[1] = torch.inf


def test_weights_that_are_not_finite_are_not_saved(tmp_path):
    """They also end training, even if the loss was finite."""
    handler = job(callbacks=[Spoils()])
    handler.save(tmp_path / "a.pt")
    before = (tmp_path / "a.pt").read_bytes()
    for call in (lambda: handler.train(1), lambda: handler.save(tmp_path / "a.pt")):
        with pytest.raises(FloatingPointError, match=r"0\.bias is not finite: load an earlier"):
            call()
    assert (tmp_path / "a.pt").read_bytes() == before


def test_an_epoch_goes_on_at_another_world_size(tmp_path):
    def work(stop_at, expected_epoch):
        seen = []

        class Stops(Callback):
            """The last rank asks all to stop."""

            def on_step_end(self):
                last = self.handler.info.world_size - 1
                if (self.handler.rank, self.handler.step) == (last, stop_at):
                    self.handler.stop()

        def note(outputs, targets):
            seen.extend(targets.tolist())
            return targets.double().mean()

        options = {"metrics": {"note": note}, "callbacks": [Stops()], "sync_every": 1}
        handler = job(model=nn.Linear(1, 1), **options)
        handler.loss_fn = lambda outputs, targets: outputs.square().mean()
        handler.set_train_loader([(torch.ones(1), index) for index in range(37)], 2)
        handler.load(tmp_path)
        handler.train(1)
        handler.save(tmp_path / f"step_{handler.step}.pt")
        assert handler.epoch == expected_epoch
        return seen, handler.history

    parts = []
    for world, stop_at, epoch in ((2, 3, 0), (1, 5, 0), (3, 99, 1)):
        how = (stop_at, epoch)
        results = run_ranks(work, *how, nproc=world, timeout=LIMIT) if world > 1 else [work(*how)]
        parts.append([index for seen, _ in results for index in seen])
        history = results[0][1]
    assert [len(part) for part in parts] == [12, 4, 21]
    assert sorted(index for part in parts for index in part) == list(range(37))
    assert history["train_note"] == [18]  # over all parts of the epoch


ACTS = """
import os, signal
from training_job import job
from ddp_ref import Callback

class Acts(Callback):
    def on_step_end(self):
        print(f"rank {self.handler.rank} step {self.handler.step}", flush=True)
        if self.handler.step == 7 and self.handler.rank == 1:
            os.kill(os.getpid(), signal.SIGHUP)

job(400, 2, callbacks=[Acts()], run_dir="saved").train(3)
"""


def test_a_signal_to_one_rank_saves_the_same_step_and_ends_all(tmp_path):
    (tmp_path / "script.py").write_text(ACTS)
    ended = run(*torchrun(2, "script.py"), cwd=tmp_path, env=TESTS, timeout=60)
    assert ended.code == 1  # torchrun exits with 1, whatever its workers exit with
    last_steps = dict(re.findall(r"rank (\d) step (\d+)", ended.stdout))
    codes = re.findall(r"exitcode +: (-?\d+)", ended.stderr)
    assert codes and set(codes) == {"143"}, ended.stderr
    assert last_steps == {"0": "10", "1": "10"}
    assert [path.name for path in (tmp_path / "saved").glob("*.pt")] == ["step_000000010.pt"]
    assert "saved saved/step_000000010.pt\nended by a signal at step 10\n" in ended.stdout
    handler = job(400, 2)
    handler.load(tmp_path / "saved")
    assert (handler.epoch, handler.step, handler.samples_seen) == (0, 10, 40)


def test_signals_are_caught_only_during_training(capsys):
    class Kill(Callback):
        def on_epoch_start(self):
            os.kill(os.getpid(), signal.SIGUSR1)

    caught = []
    before = signal.signal(signal.SIGUSR1, lambda *_: caught.append("by the handler of before"))
    try:
        with caught_signals(into := []):
            signal.raise_signal(signal.SIGUSR1)
            assert into == [signal.SIGUSR1] and not caught
        assert len(caught) == 1  # it came too late for training to act on it
        with pytest.raises(SystemExit) as ended:
            job(callbacks=[Kill()]).train(1)
        assert ended.value.code == 143 and len(caught) == 1
        assert "step 7, unsaved: there is no Checkpoint" in capsys.readouterr().out
        # The process is about to exit. Even while Python shuts down, a second signal must not
        # change the exit code.
        assert signal.getsignal(signal.SIGUSR1) == signal.SIG_IGN
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGUSR1, before)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGHUP, signal.SIG_DFL)


def test_a_file_that_does_not_fit_is_an_error(tmp_path):
    job().save(tmp_path / "a.pt")
    step = torch.optim.lr_scheduler.StepLR
    job(scheduler=lambda o: step(o, 1)).save(tmp_path / "scheduled.pt")
    torch.save(torch.load(tmp_path / "a.pt") | {"format": 2}, tmp_path / "old.pt")
    for other, name, text in (
        (job(seed=5), "a", "with seed 0, not 5"),
        (job(scheduler=lambda o: (step(o, 1), "step")), "scheduled", "per 'epoch', not 'step'"),
        (job(), "scheduled", r"with parts .*'scheduler': 'StepLR'}, not {'optimizer': 'SGD'}"),
        (job(metrics={"o": accuracy}), "a", r"with metrics \['accuracy'\], not \['o'\]"),
        (job(), "old", r"old\.pt is from another version .* load its weights"),
    ):
        with pytest.raises(ValueError, match=text):
            other.load(tmp_path / f"{name}.pt")


def test_a_copy_to_the_cpu_is_complete_when_move_returns():
    """Otherwise, Python could read memory that the GPU has not written yet."""
    tensor = Mock(spec=torch.Tensor)
    move({"outputs": [tensor]}, CPU)
    tensor.to.assert_called_once_with(CPU, non_blocking=False)


def test_a_stop_before_training_is_not_lost():
    handler = job()
    handler.stop()
    handler.train(2)
    assert handler.step == 0
    handler.train(1)
    assert handler.step == 7


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_precision_is_that_of_the_model_alone(precision):
    """Weights are float32, and the caller's own autocast has no effect."""
    handler, dtypes = job(precision=precision), set()
    handler.model.register_forward_hook(lambda module, args, out: dtypes.add(out.dtype))
    with torch.autocast("cpu", torch.bfloat16):
        handler.train(3)
        inside = handler.predict(Points(5), 2)
    assert torch.equal(inside, handler.predict(Points(5), 2))  # also with the latest weights
    assert dtypes == {torch.float32 if precision == "fp32" else torch.bfloat16}
    assert handler.model[0].weight.dtype == torch.float32
    assert handler.train_losses[-1] < handler.train_losses[0]


def test_an_epoch_goes_on_only_with_the_same_data_in_the_same_order(tmp_path):
    handler = job(40, 4)
    handler.train(1, max_steps=2)
    handler.save(tmp_path / "a.pt")
    for size, loader in ((39, {}), (40, {"shuffle": False})):
        handler = job(size, 4, loader=loader)
        handler.load(tmp_path / "a.pt")
        with pytest.raises(ValueError, match=r"cannot go on with .*: use the same data, shuffle"):
            handler.train(1)


def test_steps_that_the_scaler_skips_change_neither_weights_nor_scheduler():
    """This happens to the first steps under fp16. The scaler also works on the CPU."""

    def schedule(optimizer):
        return torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5), "step"

    handler = job(9, 3, scheduler=schedule)
    handler._scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127)
    handler.loss_fn = lambda outputs, targets: 1000 * outputs.square().mean()
    handler.train(1)
    assert torch.equal(flat(handler.model), flat(network()))
    assert handler.skipped == handler.step == 3
    assert handler.optimizer.param_groups[0]["lr"] == 0.1
    assert handler._scaler.get_scale() == 2.0**124


def test_gradients_are_unscaled_before_they_are_clipped():
    """As under fp16, but on the CPU, where the scaler works too: clipping needs the true norm."""
    weights = []
    for scale in (None, 2.0**10):
        handler = job(9, 3, clip_norm=0.1, lr=1.0)
        if scale:
            handler._scaler = torch.amp.GradScaler("cpu", init_scale=scale)
        handler.train(1)
        weights.append(flat(handler.model))
    assert torch.allclose(*weights, atol=1e-6)
    assert not torch.allclose(weights[0], flat(network()), atol=1e-2)
