"""Callbacks are called in order on every rank.

They decide from the history, which a resumed run keeps.
"""

import math
import sys
import types
from datetime import timedelta
from functools import partial
from typing import ClassVar

import pytest
import torch
from training_job import Points, flat, job, network

from ddp_ref import (
    Callback,
    Checkpoint,
    EarlyStopping,
    LearningRateMonitor,
    ProgressBar,
    initialize_ddp,
    run_ranks,
)

LIMIT = timedelta(minutes=4)


HOOKS = [name for name in vars(Callback) if name.startswith("on_")]


class Notes(Callback):
    """Record each hook that is called, with the number of epochs and steps done so far."""

    def __init__(self, name, calls):
        def note(hook):
            calls.append((name, hook, self.handler.epoch, self.handler.step))

        for hook in HOOKS:
            setattr(self, hook, partial(note, hook))


def test_a_resumed_run_may_be_the_first_to_record_what_early_stopping_monitors(tmp_path):
    job(12, 2, run_dir=tmp_path).train(1)
    handler = job(12, 2, callbacks=[EarlyStopping("val_loss")])
    handler.set_val_loader(Points(4), 2)
    handler.load(tmp_path)
    handler.train(2)
    assert handler.epoch == 2 and len(handler.val_losses) == 2


def test_hooks_are_called_in_the_order_of_the_list():
    calls = []
    handler = job(6, 3, callbacks=[Notes("a", calls), Notes("b", calls)])
    handler.train(1)
    expected = [("on_train_start", 0, 0), ("on_epoch_start", 0, 0), ("on_step_end", 0, 1)]
    expected += [("on_step_end", 0, 2), ("on_validation_start", 0, 2), ("on_epoch_end", 1, 2)]
    expected += [("on_train_end", 1, 2)]
    assert calls == [(name, *call) for call in expected for name in "ab"]


def test_a_checkpoint_is_written_after_the_other_callbacks_drew_random_numbers(tmp_path):
    class Draws(Callback):
        drawn = ()

        def on_epoch_end(self):
            self.drawn += (torch.rand(()).item(),)

    def make():
        draws = Draws()
        return job(8, 2, callbacks=[Checkpoint(tmp_path), draws], model=network(0.5)), draws

    whole, expected = make()
    whole.train(2)
    resumed, draws = make()
    resumed.load(tmp_path / "step_000000004.pt")
    with pytest.warns(UserWarning, match="is from a later step"):
        resumed.train(2)
    assert draws.drawn == expected.drawn[1:]
    assert torch.equal(flat(resumed.model), flat(whole.model))


class Replays(Callback):
    """Record given values in the history, in place of validation results."""

    def __init__(self, values):
        self.values = values

    def on_epoch_end(self):
        self.handler.history["replayed"] = self.values[: self.handler.epoch]


@pytest.mark.parametrize(
    ("values", "options", "epochs"),
    [
        ([3, 2, 1, 2, 2, 0, 0], {"patience": 2}, 5),
        ([3, 2.9, 2.8, 2.7], {"patience": 2, "min_delta": 0.5}, 3),
        ([3, 2.7, 2.4, 2.1], {"patience": 2, "min_delta": 0.5}, 4),  # 2.4 is an improvement on 3
        ([1, 2, 3, 3, 3], {"patience": 2, "mode": "max"}, 5),
        ([float("nan")] * 4 + [2, 3, 3], {"patience": 2}, 7),  # epochs with NaN do not count
        ([1, 1, 1], {"patience": 1}, 2),
    ],
)
def test_early_stopping(values, options, epochs, tmp_path):
    def make():
        return job(4, 4, callbacks=[Replays(values), EarlyStopping("replayed", **options)])

    handler = make()
    handler.train(len(values))
    assert handler.epoch == epochs
    handler.save(tmp_path / "a.pt")
    resumed = make()
    resumed.load(tmp_path / "a.pt")
    resumed.train(len(values))
    assert resumed.epoch == epochs  # a resumed run stays stopped


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: EarlyStopping(mode="least"), 'mode must be "min" or "max"'),
        (lambda: Checkpoint("a", mode="least"), 'mode must be "min" or "max", not \'least\''),
        (lambda: EarlyStopping(patience=0), "patience must be an integer of at least 1"),
        (lambda: EarlyStopping(min_delta=-1), "min_delta must be at least 0"),
        (lambda: Checkpoint("a", keep=None), "keep must be an integer of at least 1, not None"),
        (lambda: Checkpoint("a", every_steps=1.5), "every_steps must be"),
    ],
)
def test_invalid_settings_are_rejected(make, text):
    with pytest.raises(ValueError, match=text):
        make()


def test_a_monitor_that_nothing_records_is_an_error_after_the_first_epoch(tmp_path):
    """The same goes for one that needs validation data if there is none."""
    for callback in (EarlyStopping("val_loss"), Checkpoint(tmp_path, monitor="val_loss")):
        handler = job(12, 4, callbacks=[callback, LearningRateMonitor()])
        text = "no values of 'val_loss': use one of lr, train_acc"
        with pytest.raises(ValueError, match=text) as error:
            handler.train(2)
        assert handler.step == 3 and "\n" not in str(error.value)


def test_learning_rates_are_recorded_once_per_epoch(tmp_path):
    def make(*callbacks):
        return job(
            12,
            4,
            scheduler=lambda o: (torch.optim.lr_scheduler.StepLR(o, 3, 0.5), "step"),
            callbacks=[LearningRateMonitor(), *callbacks],
        )

    handler = make(Checkpoint(tmp_path, every_steps=4))
    handler.train(2)
    assert handler.history["lr"] == [0.1, 0.05]
    resumed = make()
    resumed.load(tmp_path / "step_000000004.pt")  # in the middle of the second epoch
    resumed.train(3)
    assert resumed.history["lr"] == [0.1, 0.05, 0.025]


def test_the_newest_checkpoints_and_the_best_one_are_kept(tmp_path):
    def work():
        def names(folder):
            return sorted(path.name for path in (tmp_path / folder).iterdir())

        folder = tmp_path / "epochs"
        folder.mkdir(exist_ok=True)
        (folder / ".step_000000001.pt.0.tmp").touch()  # left behind by a killed save
        initialize_ddp()
        values = [-3, -1, -2, float("nan"), -1]
        keeper = Checkpoint(folder, keep=2, monitor="replayed", mode="max")
        job(12, 2, callbacks=[Replays(values), keeper]).train(5)
        steps = 6 // torch.distributed.get_world_size()
        numbers = [4 * steps, 5 * steps]
        assert names("epochs") == ["best.pt", *(f"step_{number:09}.pt" for number in numbers)]
        best = job(12, 2)
        best.load(folder / "best.pt")
        assert best.epoch == 2 and best.history["replayed"] == [-3, -1]

        keeper = Checkpoint(tmp_path / "steps", every_epochs=None, every_steps=2, keep=9)
        handler = job(12, 2, callbacks=[keeper])
        handler.set_val_loader(Points(4), 2)
        handler.train(2)
        numbers = range(2, 2 * steps + 1, 2)
        assert names("steps") == [f"step_{number:09}.pt" for number in numbers]
        last = job(12, 2)
        last.load(tmp_path / "steps")  # saved again at the end of training
        assert last.epoch == 2 and last.history == handler.history
        return True

    assert run_ranks(work, nproc=2, timeout=LIMIT) == [True, True]


def test_checkpoints_of_a_later_step_cause_a_warning_and_are_kept(tmp_path):
    job(12, 2, callbacks=[Checkpoint(tmp_path)]).train(2)
    with pytest.warns(
        UserWarning, match=r"step_000000012.pt is from a later step than this run's 0"
    ):
        job(12, 2, callbacks=[Checkpoint(tmp_path, keep=1, every_steps=1)]).train(1)
    assert [path.name for path in sorted(tmp_path.iterdir())] == [
        "step_000000006.pt",
        "step_000000012.pt",
    ]


class Bar:
    """The part of tqdm that the callback uses."""

    all: ClassVar[list] = []

    def __init__(self, total, desc):
        self.total, self.desc, self.count, self.closed = total, desc, 0, False
        self.all.append(self)

    def set_postfix(self, values, refresh):
        self.values = dict(values)

    def update(self):
        self.count += 1

    def close(self):
        self.closed = True


def test_the_progress_bar_counts_the_steps_of_each_epoch(monkeypatch):
    monkeypatch.setitem(sys.modules, "tqdm", None)  # an import would fail
    with pytest.warns(UserWarning, match="no progress bar without tqdm: pip install tqdm"):
        job(12, 2, callbacks=[ProgressBar()]).train(1)
    monkeypatch.setitem(sys.modules, "tqdm", types.SimpleNamespace(tqdm=Bar))
    monkeypatch.setattr(Bar, "all", [])
    job(9, 2, accumulate=2, sync_every=1, callbacks=[ProgressBar()]).train(2)
    assert [(bar.total, bar.count, bar.closed) for bar in Bar.all] == [(3, 3, True)] * 2
    assert [bar.desc for bar in Bar.all] == ["epoch 1", "epoch 2"]
    for bar in Bar.all:
        assert bar.values.keys() == {"loss", "accuracy"}
        assert all(map(math.isfinite, bar.values.values()))
