"""Handler with existing code: any batch, token means, existing loaders, streams."""

from unittest.mock import Mock

import adoption_checks
import pytest
import torch
from rank_checks import check_passes, checks, on_ranks
from torch import nn
from torch.utils.data import ConcatDataset, Subset
from training_job import Points, accuracy, job, network

from ddp_ref import Callback, Checkpoint, Handler
from ddp_ref.metrics import samples_in

SCRIPT = "adoption_checks.py"


@pytest.mark.parametrize("name", checks(SCRIPT))
@pytest.mark.parametrize("launch", [on_ranks(SCRIPT, 3, fresh=True)])
def test_on_ranks(name, launch):
    check_passes(launch, name)


@pytest.mark.parametrize("name", checks(SCRIPT))
def test_in_one_process(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    getattr(adoption_checks, name)()


class Recorded(torch.optim.lr_scheduler.ReduceLROnPlateau):
    values = ()

    def step(self, value):
        self.values += (value,)
        super().step(value)


TAKEN = [Callback()]
TAKEN[0].handler = "another"


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"clip_norm": 0}, "clip_norm must be a number above 0"),
        ({"accumulate": 0}, "accumulate must be an integer of at least 1, not 0"),
        ({"precision": "fp61"}, "precision must be"),
        ({"precision": "fp16"}, 'use "bf16"'),
        ({"on_nonfinite": "ignore"}, "on_nonfinite must be"),
        ({"device": "gpu:one"}, "device must read like"),
        ({"accumulate": 2, "ddp_options": {"static_graph": True}}, "static_graph does not work"),
        (
            {"optimizer": lambda own: torch.optim.SGD([*own, nn.Parameter(torch.ones(1))])},
            "1 of the optimizer's 5 parameters are not the model's",
        ),
        (
            {"scheduler": lambda o: Recorded(torch.optim.SGD(network().parameters()))},
            "the scheduler was created with another optimizer",
        ),
        ({"scheduler": lambda o: Recorded(o, mode="max")}, "cannot use the loss of each epoch"),
        ({"metrics": [accuracy]}, "metrics must be a dict of functions"),
        ({"metrics": {"accuracy": 0.9}}, "accuracy must be a function of outputs and targets"),
        ({"metrics": {"loss": accuracy}}, "cannot be named"),
        ({"loss_fn": nn.MSELoss(reduction="sum")}, "loss_fn must be a mean, not a sum"),
        ({"callbacks": TAKEN}, "callbacks must be objects, new ones for each Handler, not <"),
    ],
)
def test_errors_that_the_constructor_gives_in_one_line(options, text):
    model, options = network(), {"optimizer": torch.optim.SGD, "device": "cpu"} | options
    optimizer = options.pop("optimizer")(model.parameters())
    loss_fn = options.pop("loss_fn", nn.functional.mse_loss)
    if make_scheduler := options.get("scheduler"):
        options["scheduler"] = make_scheduler(optimizer)
    with pytest.raises((TypeError, ValueError), match=text) as caught:
        Handler(model, optimizer, loss_fn, **options)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"count": lambda batch: -1}, r"count\(batch\) must be at least 0 and finite, not -1"),
        (
            {"size": 2, "loader": {"drop_last": True}},
            "rank 0 has no batch of training data: lower batch_size, which is 3,",
        ),
        ({"forward": lambda model, batch: 0.5}, r"forward must return \(outputs, targets\)"),
        # Boxes of images
        (
            {"loader": {"collate_fn": lambda rows: (torch.ones(3), [torch.ones(9, 4)] * 3)}},
            "3 items looks like 9 samples: pass count= to Handler",
        ),
    ],
)
def test_errors_of_the_first_step(options, text):
    handler = job(**options)
    with pytest.raises(ValueError, match=text):
        handler.train(1)
    assert handler.step == 0


class Batch:
    num_graphs = 7


@pytest.mark.parametrize(
    ("batch", "count"),
    [
        ((torch.ones(3, 2), torch.ones(5)), 5),
        ([torch.ones(5, 2), [torch.ones(5), torch.ones(5)]], 5),  # targets with two parts
        ((torch.ones(8, 2), torch.ones(2, 20), torch.ones(8)), 8),  # features, edges, labels
        ((Batch(), None), 7),
        ({"text": "abc", "ids": torch.ones(4, 9), "mask": torch.ones(2)}, 4),
    ],
)
def test_how_many_samples_a_batch_has(batch, count):
    assert samples_in(batch) == count


def test_a_plateau_gets_the_validation_loss_or_a_metric(tmp_path):
    handler = job(scheduler=Recorded)
    handler.set_val_loader(Points(9), 2)
    handler.train(2)
    assert [*handler.scheduler.values] == handler.val_losses != handler.train_losses
    handler.save(tmp_path / "a.pt")
    handler = job(scheduler=lambda o: (Recorded(o, mode="max"), "train_accuracy"))
    handler.load(tmp_path / "a.pt")
    handler.train(4)
    assert [*handler.scheduler.values[2:]] == handler.train_metrics["accuracy"][2:]
    assert torch.tensor(handler.val_losses).isnan().tolist() == [False, False, True, True]


def test_a_state_that_cannot_be_saved_is_an_error_before_the_first_step(tmp_path):
    scheduler = Mock(["step", "state_dict"])
    scheduler.state_dict.return_value = {"a": [1, Batch()]}
    handler = job(scheduler=lambda o: scheduler, callbacks=[Checkpoint(tmp_path)])
    with pytest.raises(TypeError, match=r"cannot contain \['scheduler'\]\['a'\]\[1\], a Batch: "):
        handler.train(1)
    assert handler.step == 0 and not [*tmp_path.iterdir()]


def test_new_settings_of_the_optimizer_are_kept_or_a_warning_names_them(tmp_path):
    saved = job(lr=3.0)
    saved.train(1)
    saved.save(tmp_path / "a.pt")
    handler = job(lr=0.01)
    with pytest.warns(
        UserWarning, match=r"has lr=3\.0 instead of 0\.01\. To keep yours, pass keep=\['lr'\]"
    ):
        handler.load(tmp_path / "a.pt")
    assert handler.optimizer.param_groups[0]["lr"] == 3.0
    handler = job(lr=0.01)
    handler.load(tmp_path / "a.pt", keep=("lr",))  # pytest makes a warning an error
    assert handler.optimizer.param_groups[0]["lr"] == 0.01
    assert handler.optimizer.param_groups[0]["momentum"] == 0.9


def test_hooks_may_replace_the_data_and_set_eval_mode():
    modes = []

    class Hooks(Callback):
        def on_epoch_start(self):
            self.handler.set_train_loader(Points(4 + 2 * self.handler.epoch), 2)
            self.handler.module[0].eval()

        def on_step_end(self):
            modes.append([part.training for part in self.handler.module[:2]])

    job(20, 2, callbacks=[Hooks()]).train(2)
    assert modes == [[False, True]] * 5


def test_parameters_that_are_frozen_meanwhile_are_an_error_before_the_next_step(tmp_path):
    """A new Handler that loads the checkpoint continues the run."""

    class Freezes(Callback):
        def on_epoch_start(self):
            self.handler.module[0].requires_grad_(self.handler.epoch == 0)

    handler = job(12, 4, callbacks=[Freezes(), Checkpoint(tmp_path)])
    with pytest.raises(RuntimeError, match=r"since Handler wrapped .*: set it before, or"):
        handler.train(2)
    assert (handler.epoch, handler.step) == (1, 3)
    resumed = job(12, 4, model=handler.model)
    resumed.load(tmp_path)
    before = resumed.model[0].weight.clone()
    resumed.train(2)
    assert resumed.epoch == 2 and torch.equal(resumed.model[0].weight, before)


def test_a_data_set_gets_the_epoch_also_in_a_worker_but_not_in_a_persistent_one():
    class Own(Points):
        def set_epoch(self, epoch):
            self.targets = torch.full((len(self),), epoch)

    epochs = []
    handler = job(count=lambda batch: epochs.extend(batch[1].tolist()) or 2)
    nested = Subset(ConcatDataset([Own(2), Own(2)]), range(4))  # as from random_split
    handler.set_train_loader(nested, 2, num_workers=1)
    handler.train(2)
    assert epochs == [0, 0, 0, 0, 1, 1, 1, 1]
    with pytest.raises(ValueError, match=r"Own\.set_epoch would not reach the copies"):
        handler.set_train_loader(nested, 2, num_workers=1, persistent_workers=True)


def test_a_data_set_that_grows_with_the_epoch_is_an_error():
    class Grows(Points):
        def set_epoch(self, epoch):
            self.size = 4 + 2 * epoch

        def __len__(self):
            return self.size

    data = Grows(8)
    data.set_epoch(0)
    handler = job()
    handler.set_train_loader(data, 2)
    with pytest.raises(ValueError, match=r"length of the data set from 4 to 6: call it in on_ep"):
        handler.train(2)
    assert handler.epoch == 1


def test_at_another_world_size_a_schedule_that_counts_steps_is_a_warning(tmp_path):
    def make():
        step = torch.optim.lr_scheduler.StepLR
        return job(16, 2, scheduler=lambda o: (step(o, 30), "step"))

    make().save(tmp_path / "a.pt")
    saved = torch.load(tmp_path / "a.pt")
    torch.save(saved | {"ranks": saved["ranks"] * 2}, tmp_path / "a.pt")
    handler = make()
    with pytest.warns(UserWarning, match="saved by 2 ranks, and 1 ranks take another number"):
        handler.load(tmp_path / "a.pt")


def test_a_keep_without_effect_is_an_error(tmp_path):
    step = torch.optim.lr_scheduler.StepLR
    with pytest.raises(ValueError, match="the scheduler sets it: after the load, multiply"):
        job(scheduler=lambda o: step(o, 3)).load(tmp_path, keep=("lr",))
    with pytest.raises(ValueError, match=r"keep may contain .*but got \('learning_rate',\)"):
        job().load(tmp_path, keep=("learning_rate",))
