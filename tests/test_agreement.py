"""Ranks that differ are one error on all of them, before the first step or at the epoch's end."""

import math
import os
import random
import signal
from contextlib import suppress
from datetime import timedelta
from functools import partial

import numpy as np
import pytest
import torch
from rank_checks import raised
from torch import nn
from torch.utils.data import Dataset, Subset
from training_job import Points, accuracy, flat, job, network

from ddp_ref import Callback, Checkpoint, initialize_ddp, run_ranks
from ddp_ref.agreement import check_replicas

LIMIT = timedelta(minutes=4)


def differing(rank):
    """Yield the name of each setting in which two ranks differ, a Handler and how to train it."""
    step = torch.optim.lr_scheduler.StepLR
    options = {
        "seed": {"seed": rank},
        "accumulate": {"accumulate": 1 + rank},
        "sync_every": {"sync_every": 5 + rank},
        "clip_norm": {"clip_norm": 1.0 + rank},
        "on_nonfinite": {"on_nonfinite": ("raise", "skip")[rank]},
        "training batch size": {"batch_size": 2 + rank},
        "precision": {"precision": ("fp32", "bf16")[rank]},
        "lr of the optimizer's group 0": {"lr": (0.1, 0.2)[rank]},
        "metrics": {"metrics": {("a", "b")[rank]: accuracy}},
        "scheduler": {"scheduler": (None, lambda o: step(o, 1))[rank]},
        "interval of the scheduler": {"scheduler": lambda o: (step(o, 1), ("epoch", "step")[rank])},
        "use of count=": {"count": (None, len)[rank]},
        "run_dir": {"run_dir": f"folder{rank}"},
        "Checkpoint (folder, every_epochs, every_steps, monitor, mode)": {
            "callbacks": [Checkpoint("folder", every_steps=2 + rank)]
        },
        "number of training items": {"size": 20 + rank},
    }
    for name, own in options.items():
        yield name, job(**own), (2,)
    yield "epochs", job(), (2 + rank,)
    yield "max_steps", job(), (2, 3 + rank)
    handler = job()
    handler.loss_fn = (nn.functional.cross_entropy, nn.CrossEntropyLoss())[rank]
    yield "loss_fn", handler, (2,)
    handler = job()
    handler.optimizer = (torch.optim.SGD, torch.optim.Adam)[rank](handler.module.parameters(), 0.1)
    yield "optimizer", handler, (2,)
    handler = job()
    if rank == 0:  # as under `if rank == 0:`
        handler.set_val_loader(Points(9), 3)
    yield "number of validation items", handler, (2,)
    handler = job()
    handler.set_train_loader(Subset(Points(20), range(rank, 20, 2)), 3)  # split by the script
    yield "training items", handler, (2,)
    names = [["cat", "dog"], ["dog", "cat"]][rank]  # as from list(set(names))
    handler = job()
    handler.set_val_loader([(torch.ones(4), names.index("dog"))] * 8, 2, num_workers=1)
    yield "validation items", handler, (2,)


def test_ranks_that_differ_are_one_error_that_names_the_setting_and_the_ranks(
    tmp_path, monkeypatch
):
    def work():
        rank, names = initialize_ddp(backend="gloo").rank, []
        for name, handler, arguments in differing(rank):
            error = str(raised(ValueError, handler.train, *arguments))
            assert error.startswith(f"all ranks must have the same {name}, but found "), error
            way = "; pass the whole data set, in the same order, on each: seed what draws it"
            end = " on rank 1" + way * name.endswith("items")
            assert " on rank 0; " in error and error.endswith(end), error
            assert "\n" not in error and handler.step == 0
            names.append(name)
        return names

    monkeypatch.chdir(tmp_path)
    one, other = run_ranks(work, nproc=2, timeout=LIMIT)
    assert one == other and len(one) == 22


class Flips(Dataset):
    """Each item is one of two images, drawn by a generator that the ranks do not share."""

    def __init__(self, in_worker):
        self.own, self.in_worker = np.random.default_rng(), in_worker

    def __len__(self):
        return 8

    def __getitem__(self, index):
        assert (torch.utils.data.get_worker_info() is not None) == self.in_worker
        image = torch.arange(4.0)
        image = image if self.own.random() < 0.5 else 2 * image
        return image + random.random() + torch.rand(4), index % 2


def test_random_items_that_differ_by_chance_are_no_error():
    """They are drawn in a worker if a loader has one: forks must not share an open file."""

    def states():
        return random.getstate(), torch.get_rng_state().tolist()

    def work():
        rank = initialize_ddp(backend="gloo").rank
        workers = {"num_workers": 1, "worker_init_fn": lambda worker: random.seed(rank)}
        # The first draws of some are equal, those of others are not.
        for options in ({}, {}, {}, {}, {"num_workers": 1}, workers):
            handler = job()
            handler.set_train_loader(data := Flips("num_workers" in options), 2, **options)
            handler.set_val_loader(data, 2)
            before = states()
            handler.train(0)
            assert states() == before

    run_ranks(work, nproc=2, timeout=LIMIT)


class Local:
    """A metric object that does not reduce over ranks."""

    def reset(self):
        self.values = []

    def update(self, outputs, targets):
        self.values.append(len(targets))

    def compute(self):
        return sum(self.values)


class Scores(Callback):
    """Add another score on each rank."""

    records = ("score",)

    def on_epoch_end(self):
        self.handler.history["score"] = [float(self.handler.rank)]


def test_numbers_that_differ_and_a_rank_that_does_not_load_are_an_error_on_all(tmp_path):
    def work():
        handler = job(metrics={"items": Local()})
        handler.set_val_loader(Points(9), 3)
        text = "metric 'items' differs between ranks, [5.0, 4.0]: its compute() must reduce"
        assert str(raised(ValueError, handler.train, 1)).startswith(text)
        monitor = Checkpoint(tmp_path, every_epochs=None, monitor="score")
        error = raised(ValueError, job(callbacks=[Scores(), monitor]).train, 1)
        assert str(error).startswith("score differs between ranks, ['[0.0]', '[1.0]']: append")
        call = handler.train if handler.rank else handler.load
        error = raised(ValueError, call, 2 if handler.rank else tmp_path)
        assert str(error).startswith("rank 0 in Handler.load; rank 1 in Handler.train")

    run_ranks(work, nproc=2, timeout=LIMIT)


class Drifts(Callback):
    """Change a weight on the last rank alone, in the third step."""

    def on_step_end(self):
        if self.handler.step == 3 and self.handler.rank == 1:
            with torch.no_grad():
                self.handler.module[3].bias += 0.5


class Signals(Callback):
    def on_step_end(self):
        if self.handler.step == 4:
            os.kill(os.getpid(), signal.SIGTERM)


def test_parameters_that_drift_are_an_error_at_the_epochs_end_and_before_a_save(tmp_path):
    """But a signal saves before: there may be no other checkpoint."""

    def work():
        text = r"3\.bias differs between ranks: its norm is .* Something changes weights on each"
        handler = job(callbacks=[Drifts(), Checkpoint(tmp_path / "epochs")])
        with pytest.raises(RuntimeError, match=text):
            handler.train(2)
        assert handler.epoch == 0
        with pytest.raises(RuntimeError, match=r"3\.bias differs"):
            handler.save(tmp_path / "a.pt")
        options = {"callbacks": [Drifts(), Signals()], "sync_every": 1, "run_dir": tmp_path / "run"}
        with pytest.raises(RuntimeError, match=r"3\.bias differs between ranks"):
            job(40, **options).train(1)

    run_ranks(work, nproc=2, timeout=LIMIT)
    assert [path.name for path in tmp_path.rglob("*.pt")] == ["step_000000004.pt"]


def test_an_evaluation_of_other_data_or_with_other_weights_is_an_error():
    def work():
        rank = initialize_ddp(backend="gloo").rank
        handler, shard = job(), Subset(Points(8), range(rank, 8, 2))
        handler.set_val_loader(shard, 2)
        assert "same validation items, but" in str(raised(ValueError, handler.validate))
        assert "same prediction items, but" in str(raised(ValueError, handler.predict, shard, 2))
        handler.set_val_loader(Points(8), 2)
        with torch.no_grad():
            handler.module[3].bias += rank
        for call in (handler.validate, partial(handler.predict, Points(8), 2)):
            assert str(raised(RuntimeError, call)).startswith("parameter 3.bias differs")

    run_ranks(work, nproc=2, timeout=LIMIT)


def test_a_frozen_parameter_may_be_infinite():
    model = network()
    model.mask = nn.Parameter(torch.tensor([-math.inf, 0]), requires_grad=False)
    check_replicas(model, distributed=False)


class Slow(Points):
    """Validation data; rank 1 gets a signal while it reads the fourth item."""

    def __getitem__(self, index):
        if self.rank == 1 and index == 3 * 2 + 1 and not self.signalled:
            self.signalled = True
            os.kill(os.getpid(), signal.SIGTERM)
        self.reads.append(index)
        return super().__getitem__(index)


def test_a_signal_in_validation_saves_between_two_batches_and_the_epoch_goes_on(tmp_path):
    """A rank without a signal learns of it after at most `sync_every` batches."""

    def run(name, signalled):
        folder, data = tmp_path / name, Slow(40, noise=0.5)
        data.rank, data.signalled, data.reads = initialize_ddp().rank, signalled, []
        handler = job(12, 3, model=network(dropout=0.3), run_dir=folder, sync_every=2)
        handler.set_val_loader(data, 1)
        handler.load(folder)
        data.reads.clear()
        with suppress(SystemExit):
            handler.train(2)
        return handler, len(data.reads)

    def work():
        rank = initialize_ddp(backend="gloo").rank
        whole, _ = run("whole", True)
        stopped, number = run("stopped", False)
        assert (stopped.step, stopped.epoch) == (2, 0)
        assert (stopped.run_dir / "step_000000002.pt").exists()
        assert number == (4 if rank else 5) + 4  # four are read once more, to compare them
        resumed, _ = run("stopped", True)
        assert torch.equal(flat(resumed.model), flat(whole.model))
        assert resumed.history == whole.history

    run_ranks(work, nproc=2, timeout=LIMIT)
