"""Handler on real ranks.

It ends with the weights of a plain DDP loop and reports the numbers of one process, and all ranks
take the same decisions.
"""

import os
import re
import signal
import time
from collections import UserDict
from datetime import timedelta

import handler_checks
import pytest
import torch
from harness import TESTS, run, torchrun
from rank_checks import check_passes, checks, on_ranks
from torch import nn
from training_job import Points, accuracy, flat, job, network

from ddp_ref import Callback, Handler, initialize_ddp, run_ranks
from ddp_ref.training.loss_and_metrics import RunningSums
from ddp_ref.training.model import move
from ddp_ref.training.rank_sync import RankSync, caught_signals

SCRIPT = "handler_checks.py"
LIMIT = timedelta(minutes=4)
CPU = torch.device("cpu")


@pytest.mark.parametrize("name", checks(SCRIPT))
@pytest.mark.parametrize("launch", [on_ranks(SCRIPT, 3, fresh=True)])
def test_on_ranks(name, launch):
    check_passes(launch, name)


@pytest.mark.parametrize("name", checks(SCRIPT))
def test_in_one_process(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    getattr(handler_checks, name)()


def test_ranks_sum_in_rank_order_and_get_the_same_bits():
    """At 5 ranks and above, a torch kernel would add in an order that depends on the machine."""
    draws = torch.rand(40, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    def means():
        rank, losses = initialize_ddp().rank, []
        for draw in draws:
            sums = RunningSums({}, CPU, distributed=True)
            sums.add(1, draw[rank], None, None)
            sums.commit()
            losses.append(sums.means()["loss"])
        return losses

    expected = [sum(draw) / len(draw) for draw in draws.tolist()]
    assert run_ranks(means, nproc=6, timeout=LIMIT) == [expected] * 6


def test_starting_a_summary_waits_for_nobody(tmp_path):
    """Rank 1 starts after rank 0 has started: if rank 0 waited for rank 1, both would hang."""

    started = tmp_path / "started"

    def start_and_finish():
        rank = initialize_ddp(timeout=timedelta(seconds=20), backend="gloo").rank
        rank_sync = RankSync(CPU, distributed=True)
        assert rank_sync.finish() is None
        while rank == 1 and not started.exists():
            time.sleep(0.01)
        rank_sync.stop = rank == 1
        rank_sync.start(1 + rank, torch.tensor([rank * (1.0 + rank)], dtype=torch.float64))
        started.touch()
        summary = rank_sync.finish()
        return summary.means, summary.stop, rank_sync.finish()

    results = run_ranks(start_and_finish, timeout=LIMIT)
    assert results == [([pytest.approx(2 / 3)], True, None)] * 2


def test_weights_that_are_not_finite_are_not_saved(tmp_path):
    handler = job()
    handler.save(tmp_path / "a.pt")
    before = (tmp_path / "a.pt").read_bytes()
    with torch.no_grad():
        handler.model[0].bias[1] = torch.inf
    with pytest.raises(FloatingPointError, match=r"0\.bias is not finite: load an earlier"):
        handler.save(tmp_path / "a.pt")
    assert (tmp_path / "a.pt").read_bytes() == before


class StopsAt(Callback):
    """End training at `step` if sync_every is 1.

    The last rank asks for it one step earlier, because all ranks learn of it one step later.
    """

    def __init__(self, step):
        self.step = step

    def on_step_end(self):
        if (
            self.handler.step == self.step - 1
            and self.handler.rank == self.handler.info.world_size - 1
        ):
            self.handler.stop()


def test_an_epoch_goes_on_at_another_world_size(tmp_path):
    def work(stop_at, expected_epoch):
        seen = []

        def note(outputs, targets):
            if torch.is_grad_enabled() is False:  # called as a metric
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
            sync_every=1,
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
    assert history["train_loss"] == [pytest.approx(mean, rel=0.3)]  # over all parts of the epoch


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
    ended = run(*torchrun(2, "script.py", name, where), cwd=tmp_path, env=TESTS)
    assert ended.code == 1  # torchrun exits with 1, whatever its workers exit with
    codes = re.findall(r"exitcode +: (-?\d+)", ended.stderr)
    assert codes and set(codes) == {"143"}, ended.stderr
    assert [(tmp_path / f"rank{rank}").read_text() for rank in range(2)] == ["11", "11"]
    assert [path.name for path in (tmp_path / "saved").glob("*.pt")] == ["step_000000011.pt"]
    assert "ended by a signal at step 11" in (tmp_path / "saved" / "log.txt").read_text()
    handler = job(400, 2)
    handler.load(tmp_path / "saved")
    assert (handler.epoch, handler.step, handler.samples_seen) == (0, 11, 44)


def test_signals_are_caught_only_during_training(caplog):
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
        # The process is about to exit. Even while Python shuts down, a second signal must not
        # change the exit code.
        assert signal.getsignal(signal.SIGUSR1) == signal.SIG_IGN
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGUSR1, before)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def test_weights_that_handler_did_not_save(tmp_path, caplog):
    """A snapshot with the state dict of a model in DDP."""
    caplog.set_level("INFO")
    trained = job()
    trained.train(1)
    wrapped = {f"module.{name}": value for name, value in trained.model.state_dict().items()}
    torch.save({"model": wrapped, "epochs_run": 1}, tmp_path / "a.pt")
    handler = job()
    handler.load(tmp_path / "a.pt")
    assert torch.equal(flat(handler.model), flat(trained.model)) and handler.epoch == 0
    assert caplog.messages[-1].endswith("is not from Handler.save: taking its weights only")
    handler.train(1)
    torch.save({"epochs_run": 1}, tmp_path / "a.pt")
    with pytest.raises(
        ValueError, match=r"a\.pt has no weights, only the keys \['epochs_run'\]: pass"
    ):
        handler.load(tmp_path / "a.pt")


def test_a_fresh_start_and_a_file_that_does_not_fit(tmp_path, caplog):
    caplog.set_level("INFO")
    handler = job()
    handler.load(tmp_path / "absent")
    handler.load(tmp_path)
    assert caplog.text.count("starting from scratch") == 2 and handler.step == 0
    handler.train(1)
    handler.save(tmp_path / "step_7.pt")
    handler = job()
    handler.load(tmp_path)
    assert (handler.epoch, handler.step) == (1, 7) and len(handler.train_losses) == 1
    handler.train(1)
    assert caplog.messages[-1] == "nothing to train: 1 of 1 epochs have ended already"
    with pytest.raises(FileNotFoundError):
        handler.load(tmp_path / "none.pt")
    with pytest.raises(ValueError, match="with seed 0, not 5"):
        job(seed=5).load(tmp_path / "step_7.pt")
    with pytest.raises(
        ValueError,
        match=r"with parts {'optimizer': 'SGD'}, not {'optimizer': 'SGD', 'scheduler': 'StepLR'}",
    ):
        job(scheduler=lambda o: torch.optim.lr_scheduler.StepLR(o, 1)).load(tmp_path / "step_7.pt")
    scheduled = job(scheduler=lambda o: torch.optim.lr_scheduler.StepLR(o, 1))
    scheduled.save(tmp_path / "scheduled.pt")
    stepping = job(scheduler=lambda o: (torch.optim.lr_scheduler.StepLR(o, 1), "step"))
    with pytest.raises(ValueError, match="per 'epoch', not 'step'"):
        stepping.load(tmp_path / "scheduled.pt")
    with pytest.raises(ValueError, match=r"with metrics \['accuracy'\], not \['other'\]"):
        job(metrics={"other": accuracy}).load(tmp_path / "step_7.pt")
    saved = torch.load(tmp_path / "step_7.pt") | {"format": 2}
    torch.save(saved, tmp_path / "old.pt")
    with pytest.raises(ValueError, match=r"old\.pt is from another version .* load its weights"):
        job().load(tmp_path / "old.pt")


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"accumulate": 0}, "accumulate must be an integer of at least 1, not 0"),
        ({"sync_every": 1.5}, "sync_every must be an integer of at least 1"),
        ({"clip_norm": 0}, "clip_norm must be above 0"),
        ({"precision": "fp8"}, "precision must be"),
        ({"precision": "fp16"}, 'needs a CUDA device, not cpu: use "bf16"'),
        ({"on_nonfinite": "ignore"}, "on_nonfinite must be"),
        ({"metrics": {"loss": accuracy}}, "cannot be named"),
        ({"scheduler": (None, "batch")}, "scheduler must be a scheduler or"),
        (
            {"scheduler": lambda o: (torch.optim.lr_scheduler.ReduceLROnPlateau(o), "step")},
            "ReduceLROnPlateau needs the loss of an epoch",
        ),
        ({"metrics": {"none": lambda outputs, targets: None}}, "none must be one number.*not None"),
        (
            {"size": 2, "loader": {"drop_last": True}},
            "no batch of 3 samples",
        ),
    ],
)
def test_invalid_options_are_rejected(options, text):
    with pytest.raises(ValueError, match=text):
        job(**options).train(1)


def test_a_batch_that_is_no_pair_is_an_error():
    handler = job()
    handler.set_train_loader([torch.ones(4)], 1)
    with pytest.raises(ValueError, match=r"a batch must be \(inputs, targets\), not a Tensor"):
        handler.train(1)


def test_a_loss_that_is_not_one_number_is_an_error():
    handler = job()
    handler.loop.task.loss_fn = nn.CrossEntropyLoss(reduction="none")
    with pytest.raises(ValueError, match=r"loss must be one number.* of shape \(3,\)"):
        handler.train(1)


def test_a_copy_to_the_cpu_is_complete_when_move_returns():
    """Otherwise, Python could read memory that the GPU has not written yet."""
    non_blocking = []

    class Spy(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            if func is torch.Tensor.to:
                non_blocking.append((kwargs or {})["non_blocking"])
            return super().__torch_function__(func, types, args, kwargs or {})

    move({"outputs": [torch.ones(2).as_subclass(Spy)]}, torch.device("cpu"))
    assert non_blocking == [False]


def test_bfloat16_outputs_come_from_float32_weights():
    handler, dtypes = job(precision="bf16"), set()
    handler.model.register_forward_hook(lambda module, args, out: dtypes.add(out.dtype))
    handler.train(3)
    assert dtypes == {torch.bfloat16} and handler.model[0].weight.dtype == torch.float32
    assert handler.train_losses[-1] < handler.train_losses[0]


def test_data_is_loaded_in_full_precision():
    class Rotated(Points):
        def __getitem__(self, index):
            inputs, target = super().__getitem__(index)
            assert (torch.eye(len(inputs)) @ inputs).dtype == torch.float32
            return inputs, target

    handler = job(precision="bf16")
    assert handler.predict(Rotated(5), 2).dtype == torch.bfloat16


def test_full_precision_is_kept_inside_the_callers_own_autocast():
    handler, dtypes = job(), set()
    handler.model.register_forward_hook(lambda module, args, out: dtypes.add(out.dtype))
    with torch.autocast("cpu", torch.bfloat16):
        handler.train(1)
    assert dtypes == {torch.float32}


def test_an_epoch_goes_on_only_with_the_same_data_in_the_same_order(tmp_path):
    handler = job(40, 4)
    handler.train(1, max_steps=2)
    handler.save(tmp_path / "a.pt")
    for size, loader in ((39, {}), (40, {"shuffle": False})):
        handler = job(size, 4, loader=loader)
        handler.load(tmp_path / "a.pt")
        with pytest.raises(ValueError, match=r"cannot go on with .*: use the same data, shuffle"):
            handler.train(1)


class Recorded(torch.optim.lr_scheduler.ReduceLROnPlateau):
    def step(self, value, **options):
        self.values = [*getattr(self, "values", []), value]
        super().step(value, **options)


def test_reduce_lr_on_plateau_gets_the_validation_loss_if_there_is_one(tmp_path):
    handler = job(scheduler=Recorded)
    handler.set_val_loader(Points(9), 2)
    handler.train(2)
    assert handler.scheduler.values == handler.val_losses != handler.train_losses
    handler.save(tmp_path / "a.pt")
    handler = job(scheduler=Recorded)
    handler.load(tmp_path / "a.pt")
    handler.train(4)
    assert handler.scheduler.values[2:] == handler.train_losses[2:]
    assert torch.tensor(handler.val_losses).isnan().tolist() == [False, False, True, True]


def test_a_signal_that_came_too_late_is_raised_again():
    caught = []
    before = signal.signal(signal.SIGUSR1, lambda number, frame: caught.append("mine"))
    try:
        with caught_signals(into := []):
            signal.raise_signal(signal.SIGUSR1)
            assert not caught and into == [signal.SIGUSR1]
        assert caught == ["mine"]
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_nonfinite_weights_end_training_even_if_the_loss_was_finite():
    class Root(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 2)
            self.zero = nn.Parameter(torch.zeros(2))

        def forward(self, inputs):
            return self.linear(inputs) + self.zero.abs().sqrt()

    with pytest.raises(FloatingPointError, match="zero is not finite: load an earlier"):
        job(3, 3, model=Root()).train(1)


RAISES = """
import sys, time
from datetime import timedelta
from training_job import job
from ddp_ref import Callback, initialize_ddp

class Fails(Callback):
    def on_step_end(self):
        if self.handler.step == 3 and self.handler.rank == self.handler.info.world_size - 1:
            raise KeyError("of a callback")

class Counts(Callback):
    def on_step_end(self):
        print(f"rank {self.handler.rank} step {self.handler.step}", flush=True)

initialize_ddp(timedelta(minutes=10))
job(400, 2, callbacks=[Fails(), Counts()], sync_every=10).train(1)
"""


def test_a_callback_that_raises_ends_its_process_at_once(tmp_path):
    """Even if the ranks sync only every ten steps. The others end when their connection closes."""
    (tmp_path / "script.py").write_text(RAISES)
    ended = run(*torchrun(2, "script.py"), cwd=tmp_path, env=TESTS, timeout=60)
    assert ended.code == 1 and "KeyError: 'of a callback'" in ended.stderr
    steps = [int(step) for step in re.findall(r"step (\d+)", ended.stdout)]
    assert max(steps) == 3  # a peer cannot finish the next all-reduce


class Words(UserDict):
    """A batch of a class of its own, as tokenizers return."""

    def to(self, device):
        return Words({name: value.to(device) for name, value in self.items()})

    @property
    def ids(self):
        return self["ids"]


def test_batches_of_a_class_of_their_own_and_outputs_without_a_batch_dimension():
    class Reads(nn.Linear):
        def forward(self, words):
            return super().forward(words.ids)

    def collate(samples):
        inputs = torch.stack([inputs for inputs, _ in samples])
        return Words(ids=inputs), torch.stack([target for _, target in samples])

    job(model=Reads(4, 2), loader={"collate_fn": collate}).train(1)

    class Squeezes(nn.Linear):
        def forward(self, inputs):
            return super().forward(inputs).squeeze()

    handler = job(model=Squeezes(4, 1))
    assert handler.predict(Points(7), 3).shape == (7,)  # though the last batch's output is a scalar


def test_steps_that_the_scaler_skips_change_neither_weights_nor_scheduler():
    """This happens to the first steps under fp16. The scaler also works on the CPU."""
    model = network()
    before = flat(model)

    def schedule(optimizer):
        return torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5), "step"

    handler = job(9, 3, model=model, scheduler=schedule)
    scale = 2.0**127
    handler.loop.scaler = torch.amp.GradScaler("cpu", init_scale=scale)
    handler.loop.task.loss_fn = lambda outputs, targets: 1000 * outputs.square().mean()
    handler.train(1)
    assert torch.equal(flat(model), before)
    assert handler.skipped == handler.step == 3
    assert handler.optimizer.param_groups[0]["lr"] == 0.1
    assert handler.loop.scaler.get_scale() == scale / 2**3
    handler.loop.task.loss_fn = lambda outputs, targets: outputs.mean() * torch.nan
    with pytest.raises(FloatingPointError, match="a loss of epoch 2 is not finite"):
        handler.train(2)


def test_on_epoch_start_may_put_a_part_of_the_model_into_eval_mode():
    modes = []

    class Freezes(Callback):
        def on_epoch_start(self):
            self.handler._unwrapped[0].eval()

        def on_step_end(self):
            modes.append([part.training for part in self.handler._unwrapped[:2]])

    job(6, 3, callbacks=[Freezes()]).train(2)
    assert modes == [[False, True]] * 4


def test_gradients_are_unscaled_before_they_are_clipped():
    """As under fp16, but on the CPU, where the scaler works too: clipping needs the true norm."""
    weights = []
    for scale in (None, 2.0**10):
        handler = job(9, 3, clip_norm=0.1, lr=1.0)
        if scale:
            handler.loop.scaler = torch.amp.GradScaler("cpu", init_scale=scale)
        handler.train(1)
        weights.append(flat(handler.model))
    assert torch.allclose(*weights, atol=1e-6)
    assert not torch.allclose(weights[0], flat(network()), atol=1e-2)
