"""Handler with existing code: any batch, token means, existing loaders, streams, custom loops."""

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
from ddp_ref.training import checkpoint, train_state
from ddp_ref.training.batches import default_count, detach, inputs_of, move
from ddp_ref.training.optimizer_step import move_optimizer_state

SCRIPT = "adoption_checks.py"


@pytest.mark.parametrize("name", checks(SCRIPT))
# Fresh, because torch's profiler hangs in a forked process if torch was built for CUDA.
@pytest.mark.parametrize(
    "launch", [on_ranks(SCRIPT, 2, fresh=True, full=True), on_ranks(SCRIPT, 3, fresh=True)]
)
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
        ({"scheduler": (Timm(), "step")}, ValueError, r"Timm.step\(\) needs epoch"),
        (
            {"metrics": {"f1": adoption_checks.F1().update}},
            ValueError,
            "'f1' is .* a metric object",
        ),
        ({"metrics": {"f1": adoption_checks.F1}}, ValueError, "'f1' is .*F1.* a metric object"),
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
        ({"count": lambda batch: 8.0}, r"count\(batch\) must be .* at least 0, not 8\.0"),
        ({"count": lambda batch: torch.ones(2).int()}, r"count\(batch\) must be .* not tensor"),
        ({"forward": lambda model, batch: model(batch[0])}, "outputs, targets.*, not a Tensor"),
        ({"forward": lambda model, batch: {"a": 1, "b": 2}}, "outputs, targets.*, not a dict"),
    ],
)
def test_wrong_results_of_count_and_forward_are_refused(options, text):
    handler = make_handler(**options)
    handler.set_train_loader(Points(8), batch_size=4)
    with pytest.raises(ValueError, match=text):
        handler.train(1)


@pytest.mark.parametrize(
    ("batch", "inputs"),
    [
        ((1, 2), None),
        (["a", "b"], None),
        ((["a"], torch.ones(1)), None),
        ("a", None),
        (([{"image": 1}], 2), [{"image": 1}]),  # as in object detection
        ({"ids": 1}, {"ids": 1}),
        (((3, Timm),), (3, Timm)),
    ],
)
def test_inputs_of_returns_the_inputs_or_says_what_to_do(batch, inputs):
    if inputs is None:
        with pytest.raises(ValueError, match=r"a batch must start with a tensor .* pass forward="):
            inputs_of(batch)
    else:
        assert inputs_of(batch) == inputs


class Batch:
    num_graphs = 7


@pytest.mark.parametrize(
    ("batch", "count"),
    [
        ((torch.ones(3, 2), torch.ones(5)), 5),
        ([torch.ones(5, 2), [torch.ones(5), torch.ones(5)]], 5),  # targets with two parts
        ((torch.ones(4, 2), [torch.zeros(5, 4)] * 4), 4),  # each image has the same number of boxes
        (([torch.ones(3, 8, 8)] * 2, [torch.zeros(5, 4)] * 2), 2),
        (([torch.ones(8, 2)] * 2, [torch.ones(8)] * 2), 8),  # two parts each
        ((torch.ones(3, 2), [{"boxes": torch.ones(9, 4)}, {}, {}]), 3),
        ((torch.ones(2, 2), [torch.zeros(3, 5), torch.zeros(1, 5)]), 2),  # boxes of two images
        ((torch.ones(2, 2), [torch.zeros(0, 5), torch.zeros(1, 5)]), 2),
        ((torch.ones(2, 2), [torch.zeros(0, 5), torch.zeros(0, 5)]), 2),
        ((torch.ones(8, 2), torch.ones(2, 20), torch.ones(8)), 8),  # features, edges, labels
        ((torch.ones(3, 2), torch.ones(())), 3),
        ((torch.ones(3, 2), ["a", "b", "c", "d"]), 4),
        (Batch(), 7),
        ((Batch(), None), 7),
        ({"text": "abc", "ids": torch.ones(4, 9), "mask": torch.ones(2)}, 4),
        ((torch.ones(3), torch.ones(4), torch.ones(5)), 3),
        (["a", "b", "c"], 3),
    ],
)
def test_how_many_samples_a_batch_has(batch, count):
    assert default_count(batch) == count


@pytest.mark.parametrize("last", [False, True])
def test_a_metric_object_at_another_world_size_covers_the_rest_of_the_epoch(tmp_path, last):
    """There is a warning. The value is NaN if no step of the epoch is left."""
    path, steps = str(tmp_path / "a.pt"), 4

    def save():
        class Saves(adoption_checks.Callback):
            def on_step_end(self):
                if self.handler.step == (steps if last else 1):
                    self.handler.save(path)

        metrics = {"f1": adoption_checks.F1()}
        job(16, 2, metrics=metrics, callbacks=[Saves()]).train(1)

    run_ranks(save, nproc=2)
    handler = job(16, 2, metrics={"f1": Lists()})
    with pytest.warns(UserWarning, match="saved by another number of ranks, .* resume: f1"):
        handler.load(path)
    handler.train(1)
    (value,) = handler.train_metrics["f1"]
    assert math.isnan(value) == last and handler.train_losses[0] > 0


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


def test_the_error_for_a_batch_without_a_length_says_what_to_do():
    with pytest.raises(ValueError, match=r"batch of type int has: pass count= .* a collate_fn"):
        default_count(3)


def test_optimizer_state_goes_to_the_device_of_its_parameters():
    parameter = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.Adagrad([parameter], lr=0.1)
    parameter.data = parameter.data.double()  # imitates a move, which would need a second device
    move_optimizer_state(optimizer)
    assert optimizer.state[parameter]["sum"].dtype == torch.float64


def test_all_tensors_of_a_checkpoint_are_moved_to_the_cpu(monkeypatch):
    """Without a GPU, tensors are on the CPU anyway, so this checks that `move` got each of them."""
    original_move = train_state.move

    def move_and_mark(value, device):
        assert device == torch.device("cpu")
        if isinstance(value, torch.Tensor):
            return torch.full_like(original_move(value, device), -1)
        return train_state.CPU and move_parts(value)

    def move_parts(value):
        if isinstance(value, dict):
            return {key: move_and_mark(part, torch.device("cpu")) for key, part in value.items()}
        if isinstance(value, list | tuple):
            return type(value)(move_and_mark(part, torch.device("cpu")) for part in value)
        return value

    handler = job(8, 2)
    handler.train(1)
    for module in (train_state, checkpoint):
        monkeypatch.setattr(module, "move", move_and_mark)
    state = train_state.capture(handler)

    def tensors(value):
        if isinstance(value, dict):
            value = list(value.values())
        if isinstance(value, list | tuple):
            return [tensor for part in value for tensor in tensors(part)]
        return [value] if isinstance(value, torch.Tensor) else []

    found_tensors = tensors(state)
    assert len(found_tensors) >= 4 + 4 + 2 and all((tensor == -1).all() for tensor in found_tensors)


@pytest.mark.parametrize(("mode", "best"), [("min", 2), ("max", 3)])
def test_the_best_checkpoint_is_the_lowest_or_the_highest(tmp_path, mode, best):
    class Replays(adoption_checks.Callback):
        def on_epoch_end(self):
            self.handler.history["score"] = [2.0, 1.0, 3.0, 2.5][: self.handler.epoch]

    keeper = Checkpoint(tmp_path, monitor="score", mode=mode)
    job(4, 4, callbacks=[Replays(), keeper]).train(4)
    handler = job(4, 4)
    handler.load(tmp_path / "best.pt")
    assert handler.epoch == best
    with pytest.raises(ValueError, match='mode must be "min" or "max", not \'least\''):
        Checkpoint(tmp_path, mode="least")
