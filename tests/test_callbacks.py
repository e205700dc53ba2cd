"""Callbacks are called in order on every rank.

They decide from the history, which a resumed run keeps.
"""

import sys
from functools import partial
from unittest.mock import Mock

import pytest
import torch
from training_job import job

from ddp_ref import Callback, Checkpoint, EarlyStopping, ProgressBar


class Notes(Callback):
    """Record each hook that is called, with the number of epochs and steps done so far."""

    def __init__(self, name, calls):
        def note(hook):
            calls.append((name, hook, self.handler.epoch, self.handler.step))

        for hook in [name for name in vars(Callback) if name.startswith("on_")]:
            setattr(self, hook, partial(note, hook))


def test_hooks_are_called_in_the_order_of_the_list():
    calls = []
    handler = job(6, 3, callbacks=iter([Notes("a", calls), Notes("b", calls)]))
    handler.train(1)
    expected = [("on_train_start", 0, 0), ("on_epoch_start", 0, 0), ("on_step_end", 0, 1)]
    expected += [("on_step_end", 0, 2), ("on_validation_start", 0, 2), ("on_epoch_end", 1, 2)]
    expected += [("on_train_end", 1, 2)]
    assert calls == [(name, *call) for call in expected for name in "ab"]


def test_a_checkpoint_comes_after_the_other_callbacks_and_files_of_later_steps_stay(tmp_path):
    """A file has the generators as the others left them, so a resumed run draws the same."""

    class Draws(Callback):
        drawn = ()

        def on_epoch_end(self):
            self.drawn += (torch.rand(()).item(),)

    def make():
        draws = Draws()
        return job(8, 2, callbacks=[Checkpoint(tmp_path, keep=2), draws]), draws

    whole, expected = make()
    whole.train(3)
    resumed, draws = make()
    resumed.load(tmp_path / "step_000000008.pt")
    with pytest.warns(UserWarning, match=r"_000000012.pt is from a later step than this run's"):
        resumed.train(3, max_steps=11)
        files = sorted(int(path.stem[5:]) for path in tmp_path.iterdir())
        resumed.train(3)
    assert files == [8, 11, 12]  # 12 does not count for `keep`
    assert draws.drawn == expected.drawn[2:]


class Replays(Callback):
    """Record given values in the history, in place of validation results."""

    records = ("replayed",)

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


def test_a_monitor_that_nothing_records_is_an_error_before_the_first_step():
    handler = job(12, 4, callbacks=[EarlyStopping("val_loss")])  # and no validation data
    text = "nothing records 'val_loss': use one of train_acc.*, or name it in `records`"
    with pytest.raises(ValueError, match=text):
        handler.train(2)
    assert handler.step == 0


def test_the_newest_checkpoints_and_the_best_one_are_kept(tmp_path):
    (tmp_path / ".step_000000001.pt.tmp").touch()  # left behind by a killed save
    keeper = Checkpoint(tmp_path, keep=2, monitor="replayed", mode="max")
    job(12, 2, callbacks=[Replays([-3, -1, -2, float("nan"), -1]), keeper]).train(5)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["best.pt", "step_000000024.pt", "step_000000030.pt"]
    for name in names[1:]:
        (tmp_path / name).unlink()
    best = job(12, 2)
    best.load(tmp_path)
    assert best.epoch == 2 and best.history["replayed"] == [-3, -1]


def test_the_best_checkpoint_is_written_before_the_steps(tmp_path):
    """So a full disk between the two cannot leave an older best for ever."""

    class Full(Checkpoint):
        def _save(self):
            raise OSError("no space")

    with pytest.raises(OSError, match="no space"):
        job(12, 2, callbacks=[Full(tmp_path, monitor="train_loss")]).train(1)
    assert [path.name for path in tmp_path.iterdir()] == ["best.pt"]


def test_the_progress_bar_counts_the_steps_of_each_epoch(monkeypatch):
    monkeypatch.setitem(sys.modules, "tqdm", Mock(tqdm=(tqdm := Mock())))
    job(9, 2, accumulate=2, callbacks=[ProgressBar()]).train(2)
    made = [call.kwargs for call in tqdm.call_args_list[1:]]
    assert made == [{"desc": f"epoch {n}", "total": 3, "disable": False} for n in (1, 2)]
    assert tqdm().update.call_count == 2 * 3
