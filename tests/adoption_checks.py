"""Checks that Handler works with what existing code uses.

Batches of any shape, token counts, existing loaders, streams and metric objects.
test_adoption.py runs these checks on several ranks, and also in its own process without a group.
"""

import pytest
import torch
import torch.distributed as dist
from handler_checks import (
    F1,
    SaveEach,
    assert_resumed,
    assert_same_on_all_ranks,
    rank,
    saved,
    world_size,
)
from rank_checks import run_checks
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset
from training_job import Points, flat, job, network

from ddp_ref import Handler, LearningRateMonitor
from ddp_ref.data import endless

# Sentences of different lengths: a batch has one row per token, and each class its own weight

WEIGHTS = torch.tensor([0.5, 1.0, 2.0], dtype=torch.float64)


def sentences(number):
    """Return sentences of 0 to 10 tokens, with a class for each token."""
    generator = torch.Generator().manual_seed(0)
    rows = []
    for length in ((7 * n) % 11 for n in range(number)):
        words = torch.randn(length, 4, generator=generator, dtype=torch.float64)
        rows.append((words, torch.randint(0, 3, (length,), generator=generator)))
    return rows


def collate_tokens(items):
    """Collate some sentences into one batch, a dict with the tokens of all of them."""
    words, classes = zip(*items, strict=True)
    return {"words": torch.cat(words), "classes": torch.cat(classes)}


def tagger():
    torch.manual_seed(1)
    model = nn.Linear(4, 3).double()
    return model, torch.optim.SGD(model.parameters(), lr=0.5)


def mean_over_tokens(logits, targets):
    """Return the weighted mean loss. Without tokens, the loss and its gradients are zero."""
    total = nn.functional.cross_entropy(logits, targets, WEIGHTS, reduction="sum")
    return total / WEIGHTS[targets].sum().clamp(min=0.5)


def share_right(logits, targets):
    weights = WEIGHTS[targets]
    return (weights * (logits.argmax(1) == targets)).sum() / weights.sum()


def check_gradients_and_means_are_over_all_tokens_of_all_ranks():
    items = sentences(8 * world_size())
    whole = collate_tokens(items)
    model, optimizer = tagger()
    logits = model(whole["words"])
    loss = mean_over_tokens(logits, whole["classes"])
    loss.backward()
    optimizer.step()
    right = share_right(logits, whole["classes"]).item()
    for batch_size, accumulate in ((8, 1), (2, 4), (1, 8)):  # some batches have no token at all
        handler = Handler(
            *tagger(),
            mean_over_tokens,
            forward=lambda model, batch: (model(batch["words"]), batch["classes"]),
            count=lambda batch: WEIGHTS[batch["classes"]].sum(),
            metrics={"right": share_right},
            accumulate=accumulate,
            device="cpu",
        )
        handler.set_train_loader(items, batch_size, collate_fn=collate_tokens, shuffle=False)
        handler.set_val_loader(items, batch_size, collate_fn=collate_tokens)
        expected = handler.evaluate([whole])
        assert handler.validate() == pytest.approx(expected, rel=1e-12)
        handler.train(1)
        assert handler.step == 1
        assert (flat(handler.model) - flat(model)).abs().max() < 1e-14
        assert handler.train_losses == [pytest.approx(loss.item(), rel=1e-13)]
        assert handler.train_metrics["right"] == [pytest.approx(right, rel=1e-12)]


# Existing loaders


def check_an_existing_loader_is_rebuilt_with_a_rank_aware_sampler():
    data, calls = Points(12 * world_size()), []

    def collate(items):
        calls.append(len(items))
        return torch.utils.data.default_collate(items)

    expected = job(len(data), 3)
    expected.train(2)
    handler = job()
    handler.set_train_loader(DataLoader(data, 3, shuffle=True, collate_fn=collate, drop_last=True))
    assert handler.train_loader.drop_last
    handler.train(2)
    assert torch.equal(flat(handler.model), flat(expected.model))
    assert calls == [3] * 2 * 4
    handler.set_train_loader(DataLoader(data, 4))  # in order
    drawn = torch.cat([targets for _, targets in handler.train_loader])
    assert torch.equal(drawn, data.targets[rank() :: world_size()])


def check_loaders_that_cannot_be_sharded_are_refused():
    data, handler = Points(12), job()
    own = type("Own", (DataLoader,), {"_get_iterator": lambda self: iter([])})  # as in PyG
    with pytest.raises(ValueError, match="Own makes its batches in its own"):
        handler.set_train_loader(own(data, 3))
    padding = DistributedSampler(data, 2, 0, shuffle=False)
    handler.set_val_loader(DataLoader(data, 5, sampler=padding))
    seen = torch.cat([t for _, t in handler.val_loader])
    assert torch.equal(seen, data.targets[rank() :: world_size()])  # each item once


# Streams


def check_ranks_take_the_same_number_of_steps_from_streams_of_different_lengths():
    epochs, seen, left = [], [], []

    class Stream(IterableDataset):
        def set_epoch(self, epoch):
            epochs.append(epoch)

        def __iter__(self):
            for index in range(7 + rank()):
                yield torch.full((4,), float(index)), index % 2

    def record_batch(model, batch):
        if model.training and torch.is_grad_enabled():
            seen.append(batch[0][:, 0].long().tolist())
            left.append(handler.steps_left)
        return model(batch[0]), batch[1]

    handler = job(forward=record_batch, accumulate=2)
    with pytest.raises(ValueError, match="pass steps_per_epoch for data without a length"):
        handler.set_train_loader(Stream(), 2)
    if dist.is_initialized():
        handler.set_train_loader(Stream(), 2, steps_per_epoch=3 + (rank() > 0))
        with pytest.raises(ValueError, match=r"steps left .*, but found 3 on rank 0; 4 on rank 1"):
            handler.train(1)
    handler.set_train_loader(Stream(), 2, steps_per_epoch=2, drop_last=True)
    handler.train(3)
    assert epochs == [0, 1, 2]
    assert handler.step == 6 and left == [2, 2, 1, 1] * 3 and len(handler.train_losses) == 3
    # Training takes 12 batches. A stream has 3 or 4, so it starts again when it ends, but not at
    # the start of an epoch, which continues it.
    one_pass = [[0, 1], [2, 3], [4, 5], [6, 7]][: (7 + rank()) // 2]
    assert seen == (one_pass * 12)[:12]
    assert_same_on_all_ranks(flat(handler.model))
    with pytest.raises(ValueError, match="stream gave no batch"):
        next(endless(DataLoader([])))


# Outputs and metrics


class ManyKinds(nn.Linear):
    kept = torch.empty(3, 2)

    def forward(self, inputs):
        out = super().forward(inputs)
        kinds = {
            "dict": {"loss": out.mean(), "logits": out, "first": out[:, 0]},
            "kept": self.kept[: len(out)].copy_(out),  # the same memory for every batch
            "squeezed": out[:, 0].squeeze(),
            "nested": {"logits": out, "heads": {"mass": out}},
            "mean": out.mean(0),
        }
        return kinds[self.kind]


def check_outputs_are_tensors_or_mappings_of_them_and_nothing_is_lost():
    torch.manual_seed(0)
    data = Points(7)
    handler = job(model=ManyKinds(4, 2), forward=lambda m, b: (m(b[0]), b[1]))
    model = handler.module
    with torch.no_grad():
        logits = nn.functional.linear(data.inputs, model.weight, model.bias)

    def predict(kind, batch_size=2):
        model.kind = kind
        return handler.predict(data, batch_size)

    of_dict, kept, squeezed = [predict(kind) for kind in ("dict", "kept", "squeezed")]
    if rank() == 0:
        assert [*of_dict] == ["logits", "first"]
        for whole in (of_dict["logits"], kept):
            assert torch.allclose(whole, logits)
        for first in (of_dict["first"], squeezed):
            assert torch.allclose(first, logits[:, 0])
    with pytest.raises(TypeError, match=r"not a dict as 'heads'\. .* loader = eval_loader"):
        predict("nested")
    data = Points(3 * world_size())
    with pytest.raises(ValueError, match=r"2 outputs for .* items: return one row per item"):
        predict("mean", 3)
    if dist.is_initialized():
        with pytest.raises(ValueError, match="the same data, and outputs with rows of one shape"):
            predict("kept" if rank() else "squeezed")
        data = Points(7 + rank())
        with pytest.raises(ValueError, match="have the same number of prediction items, but found"):
            predict("kept")


def check_metric_objects_are_exact_on_uneven_data():
    torch.manual_seed(0)
    handler = job(24 * world_size(), 2, metrics={"f1": F1()}, lr=0.0)
    data = Points(17)
    handler.set_val_loader(data, 2)
    predicted, targets = handler.module(data.inputs).argmax(1), data.targets
    f1 = 2 * (predicted & targets).sum().item() / (predicted + targets).sum().item()
    assert handler.validate()["f1"] == pytest.approx(f1, rel=1e-12)
    handler.train(1)
    assert handler.train_metrics == {"f1": []}  # it is for validation
    assert handler.val_metrics == {"f1": [handler.validate()["f1"]]}


def check_buffers_that_ddp_leaves_to_each_rank_stay_as_they_are():
    """Either all of them, or those on DDP's own list of what to ignore."""
    for ignore in (False, True):
        model = nn.Sequential(nn.BatchNorm1d(4), network())
        model.register_buffer("queue", torch.full((2 + rank(),), float(rank())))  # other lengths
        if ignore:
            model._ddp_params_and_buffers_to_ignore = ["queue"]
        options = {"broadcast_buffers": ignore}
        handler = job(8 * world_size(), 2, model=model, ddp_options=options)
        handler.set_val_loader(Points(5), 2)
        handler.train(1)
        handler.predict(Points(5), 2)
        assert model.queue.tolist() == [rank()] * (2 + rank())
        if dist.is_initialized():
            means = [torch.empty(4) for _ in range(world_size())]
            handler.validate()
            dist.all_gather(means, model[0].running_mean)
            assert torch.equal(means[0], means[-1]) == ignore


def check_training_stops_exactly_at_max_steps_and_goes_on_from_there():
    whole, stopped = job(8 * world_size(), 2), job(8 * world_size(), 2, sync_every=10)
    whole.train(3)
    for steps in (4, 6, 6, 8, 9):  # an epoch has four steps
        stopped.train(3, max_steps=steps)
        assert (stopped.step, stopped.epoch) == (steps, steps // 4)
    stopped.train(3)
    assert stopped.history == whole.history
    assert torch.equal(flat(stopped.model), flat(whole.model))


def check_a_scheduler_steps_at_an_epochs_end_also_if_the_run_is_resumed_there():
    def make():
        callbacks = [LearningRateMonitor(), SaveEach()]
        exponential = torch.optim.lr_scheduler.ExponentialLR
        return job(8, 2, scheduler=lambda o: exponential(o, 0.5), callbacks=callbacks)

    whole = make()
    whole.train(4)
    assert whole.history["lr"] == [0.1, 0.05, 0.025, 0.0125]
    last_step = whole.step // 4
    for name in ("epoch_1", last_step):
        resumed = make()
        resumed.load(saved(name))
        resumed.train(4)
        assert_resumed(resumed.history, whole.history)


if __name__ == "__main__":
    run_checks(globals())
