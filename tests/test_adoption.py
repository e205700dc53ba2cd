"""Handler with existing code: any batch, token means, existing loaders, streams, custom loops."""

import gc
import math
from collections import OrderedDict
from dataclasses import dataclass

import adoption_checks
import pytest
import torch
from rank_checks import check_passes, checks, on_ranks
from torch import nn
from training_job import Points, job, network

from ddp_ref import Checkpoint, Handler, run_ranks
from ddp_ref.training.loss_and_metrics import samples_in
from ddp_ref.training.model import detach, move

SCRIPT = "adoption_checks.py"


@pytest.mark.parametrize("name", checks(SCRIPT))
# Fresh, because torch's profiler hangs in a forked process if torch was built for CUDA.
@pytest.mark.parametrize("launch", [on_ranks(SCRIPT, 3, fresh=True)])
def test_on_ranks(name, launch):
    check_passes(launch, name)


@pytest.mark.parametrize("name", checks(SCRIPT))
def test_in_one_process(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    getattr(adoption_checks, name)()


class Timm:
    """A scheduler like those of timm, whose `step` takes the number of the epoch."""

    def step(self, epoch, metric=None):
        raise AssertionError


def make_handler(**options):
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    arguments = {"optimizer": optimizer, "loss_fn": nn.functional.cross_entropy, "device": "cpu"}
    return Handler(model, **arguments | options)


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"optimizer": []}, TypeError, "one torch.optim.Optimizer, not a list: .* own loop"),
        ({"scheduler": {"scheduler": 1}}, ValueError, r"a scheduler or .*\{.*dict\['scheduler'\]"),
        ({"scheduler": Timm()}, ValueError, r"Timm.step\(\) needs epoch: step it in a Callback"),
        (
            {"metrics": {"f1": adoption_checks.F1().update}},
            ValueError,
            "'f1' is .* a metric object",
        ),
        ({"metrics": {"f1": adoption_checks.F1}}, ValueError, "'f1' is .*F1.* a metric object"),
        (
            {"accumulate": 2, "ddp_options": {"static_graph": True}},
            ValueError,
            "static_graph does not work with accumulate above 1",
        ),
    ],
)
def test_errors_seen_while_porting_projects_are_one_line(options, error, text):
    with pytest.raises(error, match=text) as caught:
        make_handler(**options)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"count": lambda batch: -1}, r"count\(batch\) must be .* at least 0, not -1"),
        ({"count": lambda batch: torch.ones(2).int()}, r"count\(batch\) must be .* not tensor"),
        ({"forward": lambda model, batch: {"a": 1, "b": 2}}, "outputs, targets.*, not a dict"),
    ],
)
def test_wrong_results_of_count_and_forward_are_refused(options, text):
    handler = make_handler(**options)
    handler.set_train_loader(Points(8), batch_size=4)
    with pytest.raises(ValueError, match=text):
        handler.train(1)


class Batch:
    num_graphs = 7


@pytest.mark.parametrize(
    ("batch", "count"),
    [
        ((torch.ones(3, 2), torch.ones(5)), 5),
        ([torch.ones(5, 2), [torch.ones(5), torch.ones(5)]], 5),  # targets with two parts
        ((torch.ones(8, 2), torch.ones(2, 20), torch.ones(8)), 8),  # features, edges, labels
        ((torch.ones(3, 2), torch.ones(())), 3),
        (Batch(), 7),
        ((Batch(), None), 7),
        ({"text": "abc", "ids": torch.ones(4, 9), "mask": torch.ones(2)}, 4),
    ],
)
def test_how_many_samples_a_batch_has(batch, count):
    assert samples_in(batch) == count


@pytest.mark.parametrize(
    ("collate", "count"),
    [
        (lambda rows: (torch.ones(4, 3), [torch.ones(9, 4) for _ in rows]), 9),  # boxes of images
        (lambda rows: [torch.stack(part) for part in zip(*rows[1:], strict=True)], 3),
    ],
    ids=["detection", "drops a row"],
)
def test_a_count_that_is_not_the_number_of_items_asks_for_count(collate, count):
    points = torch.utils.data.TensorDataset(torch.ones(8, 3), torch.ones(8, 3))
    model = nn.Linear(3, 3)
    sgd = torch.optim.SGD(model.parameters(), 0.1)
    handler = Handler(model, sgd, lambda outputs, targets: outputs.mean())
    handler.set_train_loader(points, 4, collate_fn=collate)
    with pytest.raises(
        ValueError, match=rf"4 items looks like {count} samples: pass count= to Han"
    ):
        handler.train(1)


def test_more_errors_that_the_constructor_gives_in_one_line():
    embedding = nn.Embedding(4, 2, sparse=True)
    sgd, loss = torch.optim.SGD(embedding.parameters(), 0.1), nn.functional.cross_entropy
    for options in ({"clip_norm": 1.0}, {"on_nonfinite": "skip"}):
        with pytest.raises(ValueError, match="cannot read sparse gradients"):
            Handler(embedding, sgd, loss, **options)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(sgd, mode="max")
    with pytest.raises(ValueError, match=r"would get a loss: pass \(scheduler, \"val_accuracy\"\)"):
        Handler(embedding, sgd, loss, scheduler=plateau)
    other = torch.optim.SGD([*embedding.parameters(), nn.Parameter(torch.ones(1))])
    with pytest.raises(ValueError, match="1 of the optimizer's 2 parameters are not the model's"):
        Handler(embedding, other, loss)

    class ZeroRedundancyOptimizer(torch.optim.SGD):
        pass

    zero = ZeroRedundancyOptimizer(embedding.parameters(), 0.1)
    with pytest.raises(ValueError, match="shards its state, which rank 0 could not save"):
        Handler(embedding, zero, loss)
    with pytest.raises(ValueError, match="LBFGS runs the model several times per step"):
        Handler(embedding, torch.optim.LBFGS(embedding.parameters()), loss)


def test_a_plateau_may_watch_a_metric(tmp_path):
    def plateau(optimizer):
        on = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, mode="max", patience=0)
        return on, "train_accuracy"

    handler = job(scheduler=plateau, metrics={"accuracy": lambda o, t: torch.tensor(0.5)})
    handler.train(3)
    assert handler.scheduler.best == 0.5 and handler.scheduler.num_bad_epochs == 0
    assert handler.optimizer.param_groups[0]["lr"] == pytest.approx(0.1**3)
    unknown = job(scheduler=lambda o: (plateau(o)[0], "val_acc"), callbacks=[Checkpoint(tmp_path)])
    with pytest.raises(ValueError, match="the history has no values of 'val_acc': use one of"):
        unknown.train(1)
    corrected = job(scheduler=lambda o: (plateau(o)[0], "train_loss"))
    corrected.load(tmp_path)
    corrected.train(2)
    assert corrected.scheduler.best == corrected.train_losses[0]


class Strange:
    """A scheduler with a state that a checkpoint cannot contain."""

    def step(self):
        raise AssertionError

    def state_dict(self):
        return {"a": [1, Batch()]}


def test_a_state_that_cannot_be_saved_is_an_error_before_the_first_step(tmp_path):
    handler = job(scheduler=lambda o: Strange(), callbacks=[Checkpoint(tmp_path)])
    with pytest.raises(TypeError, match=r"cannot contain \['scheduler'\]\['a'\]\[1\], a Batch: "):
        handler.train(1)
    assert handler.step == 0 and not [*tmp_path.iterdir()]


def test_new_settings_of_the_optimizer_are_kept_or_a_warning_names_them(tmp_path):
    saved = job(lr=3.0)
    saved.train(1)
    saved.save(tmp_path / "a.pt")
    handler = job(lr=0.01)
    with pytest.warns(UserWarning, match=r"lr=3\.0, which replaces lr=0\.01: pass keep=\['lr'\]"):
        handler.load(tmp_path / "a.pt")
    assert handler.optimizer.param_groups[0]["lr"] == 3.0
    handler = job(lr=0.01)
    handler.load(tmp_path / "a.pt", keep=("lr",))  # pytest makes a warning an error
    assert handler.optimizer.param_groups[0]["lr"] == 0.01
    assert handler.optimizer.param_groups[0]["momentum"] == 0.9
    step = torch.optim.lr_scheduler.StepLR
    with pytest.raises(ValueError, match="the scheduler sets it: after the load, multiply each"):
        job(scheduler=lambda o: step(o, 3)).load(tmp_path / "a.pt", keep=("lr",))


def test_a_schedule_of_steps_at_another_world_size_is_a_warning(tmp_path):
    def stepping():
        return job(8, 2, scheduler=lambda o: (torch.optim.lr_scheduler.StepLR(o, 3), "step"))

    path = str(tmp_path / "a.pt")
    run_ranks(lambda: stepping().save(path), nproc=2)
    with pytest.warns(UserWarning, match="saved by 2 ranks, and 1 ranks take another number"):
        stepping().load(path)


def test_hooks_may_replace_the_data_and_run_before_validation(tmp_path):
    """So does a run that is resumed in the second epoch."""
    calls = []

    class Hooks(adoption_checks.Callback):
        def on_epoch_start(self):
            self.handler.set_train_loader(Points(4 + 2 * self.handler.epoch), 2)

        def on_validation_start(self):
            calls.append((self.handler.step, len(self.handler.val_losses)))

    handler = job(20, 2, callbacks=[Hooks(), Checkpoint(tmp_path, None, every_steps=3)])
    handler.set_val_loader(Points(9), 3)
    handler.train(2)
    assert calls == [(2, 0), (5, 1)]
    resumed = job(20, 2, callbacks=[Hooks()])
    resumed.load(tmp_path / "step_000000003.pt")
    resumed.train(2)
    assert resumed.train_losses == handler.train_losses


def test_parameters_that_are_frozen_meanwhile_are_an_error_before_the_next_step(tmp_path):
    """A new Handler that loads the checkpoint continues the run."""

    class Freezes(adoption_checks.Callback):
        def on_epoch_start(self):
            self.handler._unwrapped[0].requires_grad_(self.handler.epoch == 0)

    handler = job(12, 4, callbacks=[Freezes(), Checkpoint(tmp_path)])
    with pytest.raises(RuntimeError, match="since Handler wrapped the model: set it before, or"):
        handler.train(2)
    assert (handler.epoch, handler.step) == (1, 3)
    frozen = network()
    frozen[0].requires_grad_(False)
    resumed = job(12, 4, model=frozen)
    resumed.load(tmp_path)
    before = frozen[0].weight.clone()
    resumed.train(2)
    assert resumed.epoch == 2 and torch.equal(frozen[0].weight, before)


def test_a_run_saved_after_an_epochs_last_step_goes_on(tmp_path):
    whole = job(12, 4, callbacks=[Checkpoint(tmp_path, every_epochs=None, every_steps=3)])
    whole.train(2)
    handler = job(12, 4)
    handler.load(tmp_path / "step_000000003.pt")
    assert handler.epoch == 0
    handler.train(2)
    assert handler.history == whole.history


def test_a_data_set_gets_the_epoch_also_in_a_persistent_worker():
    class Own(Points):
        def set_epoch(self, epoch):
            self.targets = torch.full((4,), epoch)

    epochs = []
    handler = job(count=lambda batch: epochs.extend(batch[1].tolist()) or 2)
    handler.set_train_loader(Own(4), 2, num_workers=1, persistent_workers=True)
    handler.train(2)
    assert epochs == [0, 0, 0, 0, 1, 1, 1, 1]
    del handler
    gc.collect()  # ends the worker


def test_a_metric_object_at_another_world_size_covers_the_rest_of_the_epoch(tmp_path):
    """There is a warning. The value is NaN if no step of the epoch is left."""

    class Saves(adoption_checks.Callback):
        def on_step_end(self):
            self.handler.save(tmp_path / f"{self.handler.step}.pt")

    def save():
        job(16, 2, metrics={"f1": adoption_checks.F1()}, callbacks=[Saves()]).train(1)

    run_ranks(save, nproc=2)
    for step in (1, 4):
        handler = job(16, 2, metrics={"f1": Lists()})
        with pytest.warns(UserWarning, match="were saved by other ranks, .* resume: f1"):
            handler.load(tmp_path / f"{step}.pt")
        handler.train(1)
        (value,) = handler.train_metrics["f1"]
        assert math.isnan(value) == (step == 4) and handler.train_losses[0] > 0


class Lists(adoption_checks.F1):
    """Like a torchmetrics object with list states, it cannot compute without an update."""

    def compute(self):
        if not self.counts.any():
            raise ValueError("No samples to concatenate")
        return super().compute()


class Output(OrderedDict):
    """Like the outputs of Hugging Face: a dict with attributes, whose `update` raises an error."""

    @property
    def logits(self):
        return self["logits"]

    def update(self, *_):
        raise AssertionError


@dataclass(frozen=True)
class Plain:
    logits: torch.Tensor
    name: str = "a"


def test_outputs_keep_their_class():
    logits = torch.ones(2, requires_grad=True)
    output = Output()
    output["logits"], output["parts"] = logits, [logits, "text"]
    for value in (output, Plain(logits)):
        detached = detach(value)
        assert type(detached) is type(value) and not detached.logits.requires_grad
        assert value.logits.requires_grad  # the model's own tensors stay as they are
        assert move(value, torch.device("cpu")).logits is logits


def test_the_error_for_a_batch_without_a_length_or_without_samples_says_what_to_do():
    with pytest.raises(ValueError, match=r"batch of type int has: pass count= .* a collate_fn"):
        samples_in(3)
    with pytest.raises(ValueError, match="a batch has no samples: make the collate_fn keep"):
        samples_in((torch.ones(0, 4), torch.ones(0)))
