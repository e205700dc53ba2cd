"""Handler on real ranks: a DDP loop's weights, one process's numbers, one decision for all."""

import os
import re
import signal
from datetime import timedelta
from pathlib import Path

import handler_checks
import pytest
import torch
from harness import run, torchrun
from rank_checks import check_passes, checks
from torch import nn
from training_job import Points, accuracy, job

from ddp_ref import Callback, Handler, run_ranks

SCRIPT = "handler_checks.py"
LIMIT = timedelta(minutes=2)


@pytest.mark.parametrize("name", checks(SCRIPT))
@pytest.mark.parametrize("world", [2, 3])
def test_on_ranks(name, world):
    check_passes(SCRIPT, name, world)


@pytest.mark.parametrize("name", checks(SCRIPT))
def test_in_one_process(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    getattr(handler_checks, name)()


def test_weights_that_are_not_finite_are_not_saved(tmp_path):
    handler = job()
    handler.save(tmp_path / "a.pt")
    before = (tmp_path / "a.pt").read_bytes()
    with torch.no_grad():
        handler.model[0].bias[1] = torch.inf
    with pytest.raises(FloatingPointError, match=r"0\.bias is not finite: it is not saved"):
        handler.save(tmp_path / "a.pt")
    assert (tmp_path / "a.pt").read_bytes() == before


class StopsAt(Callback):
    def __init__(self, step):
        self.step = step

    def on_step_end(self):
        if self.handler.step == self.step and self.handler.rank == self.handler.info.world_size - 1:
            self.handler.stop()


def test_an_epoch_goes_on_at_another_world_size(tmp_path):
    def work(stop_at, expected_epoch):
        seen = []

        def note(outputs, targets):
            if torch.is_grad_enabled() is False:  # a metric
                seen.extend(targets.tolist())
            return 0.0

        torch.set_num_threads(1)
        model = nn.Linear(1, 1)
        handler = Handler(
            model,
            torch.optim.SGD(model.parameters(), lr=0.01),
            lambda outputs, targets: (outputs[:, 0] - targets).square().mean(),
            metrics={"note": note},
            callbacks=[StopsAt(stop_at)],
            exchange_every=1,
            device="cpu",
        )
        pairs = [(torch.tensor([0.1]), torch.tensor(float(i))) for i in range(37)]
        handler.set_train_loader(pairs, 2)
        handler.load(tmp_path)
        handler.train(1)
        handler.save(tmp_path / f"step_{handler.step}.pt")
        assert handler.epoch == expected_epoch
        return seen, handler.history

    parts = []
    for world, stop_at, epoch in ((2, 3, 0), (1, 5, 0), (3, 99, 1)):
        results = run_ranks(work, stop_at, epoch, nproc=world, timeout=LIMIT)
        parts.append([index for seen, _ in results for index in seen])
        history = results[0][1]
    assert [len(part) for part in parts] == [12, 4, 21]
    assert sorted(index for part in parts for index in part) == list(range(37))
    mean = sum((target - 0.0) ** 2 for target in range(37)) / 37
    assert history["train_loss"] == [pytest.approx(mean, rel=0.3)]  # of all parts


SIGNALLED = """
import os, signal, sys
from pathlib import Path
from training_job import job
from ddp_ref import Callback, Checkpoint

class Signal(Callback):
    def on_step_end(self):
        if self.handler.step == 7 and self.handler.rank == 1:
            os.kill(os.getpid(), getattr(signal, sys.argv[1]))

callbacks = [Signal()] + [Checkpoint("saved")] * (sys.argv[2] == "callback")
handler = job(400, 2, callbacks=callbacks, run_dir="saved")
try:
    handler.train(3)
finally:
    Path(f"rank{handler.rank}").write_text(f"{handler.step}")
"""


@pytest.mark.parametrize(("name", "where"), [("SIGTERM", "callback"), ("SIGUSR1", "run_dir")])
def test_a_signal_to_one_rank_saves_the_same_step_and_ends_all(tmp_path, name, where):
    (tmp_path / "script.py").write_text(SIGNALLED)
    path = {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *_pythonpath()])}
    ended = run(*torchrun(2, "script.py", name, where), cwd=tmp_path, env=path)
    assert ended.code == 1  # torchrun's, whatever its workers' are
    codes = re.findall(r"exitcode +: (-?\d+)", ended.stderr)
    assert codes and set(codes) == {"143"}, ended.stderr
    assert [(tmp_path / f"rank{rank}").read_text() for rank in range(2)] == ["10", "10"]
    assert [path.name for path in (tmp_path / "saved").glob("*.pt")] == ["step_000000010.pt"]
    assert "ended by a signal at step 10" in (tmp_path / "saved" / "log.txt").read_text()
    handler = job(400, 2)
    handler.load(tmp_path / "saved")
    assert (handler.epoch, handler.step, handler.position) == (0, 10, 40)


def _pythonpath():
    return [os.environ["PYTHONPATH"]] if "PYTHONPATH" in os.environ else []


def test_signals_are_caught_only_while_it_trains(caplog):
    def mine(number, frame):
        raise AssertionError("the handler of before")

    class Kill(Callback):
        def on_epoch_start(self):
            os.kill(os.getpid(), signal.SIGUSR1)

    caplog.set_level("INFO")
    before = signal.signal(signal.SIGUSR1, mine)
    try:
        job().train(1)
        assert signal.getsignal(signal.SIGUSR1) is mine
        assert "no Checkpoint callback and no run_dir" in caplog.text
        with pytest.raises(SystemExit) as caught:
            job(callbacks=[Kill()]).train(1)
        assert caught.value.code == 143
        # On its way out: also while Python ends, a second signal must not change the exit code.
        assert signal.getsignal(signal.SIGUSR1) == signal.SIG_IGN
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGUSR1, before)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def test_a_fresh_start_a_damaged_file_and_one_that_does_not_fit(tmp_path, caplog):
    caplog.set_level("INFO")
    handler = job()
    handler.load(tmp_path / "absent")
    handler.load(tmp_path)
    assert caplog.text.count("a fresh start") == 2 and handler.step == 0
    handler.train(1)
    handler.save(tmp_path / "step_7.pt")
    (tmp_path / "step_8.pt").write_bytes(b"no")
    handler = job()
    with pytest.warns(UserWarning, match="taking the one before it"):
        handler.load(tmp_path)
    assert (handler.epoch, handler.step) == (1, 7) and len(handler.train_losses) == 1
    with pytest.raises(FileNotFoundError):
        handler.load(tmp_path / "none.pt")
    with pytest.raises(ValueError, match="seed 0, not 5"):
        job(seed=5).load(tmp_path / "step_7.pt")
    with pytest.raises(ValueError, match="this Handler has optimizer, scheduler"):
        job(scheduler=lambda o: torch.optim.lr_scheduler.StepLR(o, 1)).load(tmp_path / "step_7.pt")
    with pytest.raises(ValueError, match="other metrics"):
        job(metrics={}).load(tmp_path / "step_7.pt")


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"accumulate": 0}, "accumulate must be an integer of at least 1, not 0"),
        ({"exchange_every": 1.5}, "exchange_every must be an integer of at least 1"),
        ({"clip_norm": 0}, "clip_norm must be above 0"),
        ({"precision": "fp8"}, "precision must be"),
        ({"precision": "fp16"}, 'needs a CUDA device, not cpu: use "bf16"'),
        ({"on_nonfinite": "ignore"}, "on_nonfinite must be"),
        ({"metrics": {"loss": accuracy}}, "cannot be named"),
        ({"scheduler": (None, "batch")}, "scheduler must be one"),
    ],
)
def test_a_setting_that_is_not_there_is_refused(options, text):
    with pytest.raises(ValueError, match=text):
        job(**options)


def test_what_is_missing_is_named(monkeypatch):
    handler = job()
    for call, text in [
        (lambda: handler.validate(), "call set_val_loader first"),
        (lambda: handler.sample(1), "give Sequential one"),
        (lambda: handler.predict([["a"]], 1), "must begin with a tensor"),
    ]:
        with pytest.raises(ValueError, match=text):
            call()
    handler.set_train_loader([torch.ones(4)], 1)
    with pytest.raises(ValueError, match=r"a batch must be \(inputs, targets\), not a Tensor"):
        handler.train(1)


def test_bfloat16_and_a_scheduler_an_epoch():
    handler = job(
        precision="bf16",
        scheduler=lambda o: torch.optim.lr_scheduler.ReduceLROnPlateau(o, patience=0),
    )
    dtypes = set()
    handler.model.register_forward_hook(lambda module, args, out: dtypes.add(out.dtype))
    handler.set_val_loader(Points(9), 2)
    handler.train(3)
    assert dtypes == {torch.bfloat16} and handler.model[0].weight.dtype == torch.float32
    assert handler.train_losses[-1] < handler.train_losses[0]
    assert handler._optimization.scheduler.last_epoch == 3
