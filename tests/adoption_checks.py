"""Checks that Handler works with what existing code uses.

Batches of any shape, token counts, existing loaders, streams, metric objects and custom loops.
test_adoption.py runs these checks on several ranks, and also in its own process without a group.
"""

import math
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from handler_checks import (
    SaveEach,
    assert_same_on_all_ranks,
    gloo_calls,
    rank,
    world_size,
)
from rank_checks import run_checks
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Subset,
)
from training_job import Points, flat, job, network

from ddp_ref import (
    Callback,
    Checkpoint,
    Handler,
    eval_loader,
    initialize_ddp,
    reduce_sum,
    train_loader,
    wrap_model,
)

# Sentences of different lengths: a batch has one row per token


def sentences(number):
    """Return sentences of 0 to 10 tokens, with a class for each token."""
    generator = torch.Generator().manual_seed(0)
    lengths = [(7 * n) % 11 for n in range(number)]
    return [
        (
            torch.randn(length, 4, generator=generator, dtype=torch.float64),
            torch.randint(0, 3, (length,), generator=generator),
        )
        for length in lengths
    ]


def collate_tokens(items):
    """Collate some sentences into one batch, a dict with the tokens of all of them."""
    words, classes = zip(*items, strict=True)
    return {"words": torch.cat(words), "classes": torch.cat(classes)}


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.linear = nn.Linear(4, 3).double()

    def forward(self, words):
        return {"logits": self.linear(words), "loss": torch.zeros(())}


def mean_over_tokens(outputs, targets):
    """Return the mean loss per token. Without tokens, the loss and its gradients are zero."""
    total = nn.functional.cross_entropy(outputs["logits"], targets, reduction="sum")
    return total / max(len(targets), 1)


def tagger(**options):
    torch.set_num_threads(1)
    model = Tagger()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    options = {
        "forward": lambda model, batch: (model(batch["words"]), batch["classes"]),
        "count": lambda batch: len(batch["classes"]),
        "metrics": {"right": lambda o, t: (o["logits"].argmax(1) == t).double().mean()},
        "device": "cpu",
    } | options
    return Handler(model, optimizer, mean_over_tokens, **options)


def one_big_batch(items):
    model = Tagger()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    batch = collate_tokens(items)
    outputs = model(batch["words"])
    loss = mean_over_tokens(outputs, batch["classes"])
    loss.backward()
    optimizer.step()
    right = (outputs["logits"].argmax(1) == batch["classes"]).double().mean()
    return flat(model), loss.item(), right.item()


def check_gradients_and_means_are_over_all_tokens_of_all_ranks():
    items = sentences(8 * world_size())
    weights, loss, right = one_big_batch(items)
    for batch_size, accumulate in ((8, 1), (2, 4), (1, 8)):  # some batches have no token at all
        handler = tagger(accumulate=accumulate)
        handler.set_train_loader(items, batch_size, collate_fn=collate_tokens, shuffle=False)
        handler.set_val_loader(items, batch_size, collate_fn=collate_tokens)
        whole = handler.evaluate([collate_tokens(items)])
        assert handler.validate() == {name: pytest.approx(whole[name], rel=1e-12) for name in whole}
        handler.train(1)
        assert handler.step == 1
        assert (flat(handler.model) - weights).abs().max() < 1e-14
        assert handler.train_losses == [pytest.approx(loss, rel=1e-13)]
        assert handler.train_metrics["right"] == [pytest.approx(right, rel=1e-12)]


def check_a_count_costs_one_all_reduce_per_step():
    def calls(**options):
        handler = job(12 * world_size(), 3, **options)
        return gloo_calls(lambda: handler.train(1))

    with_count, without = calls(count=lambda batch: len(batch[1])), calls()
    expected = {"gloo:all_reduce": 4} if dist.is_initialized() else {}
    assert with_count - without == Counter(expected) and not without - with_count


def collate_to_dict(items):
    inputs, targets = torch.utils.data.default_collate(items)
    return {"inputs": inputs, "extra": "a text", "targets": targets}


def check_forward_unpacks_a_batch_and_checkpoints_keep_the_models_names():
    size = 8 * world_size()
    pairs, dicts = job(size, 2), job(size, 2, forward=lambda m, b: (m(b["inputs"]), b["targets"]))
    dicts.set_train_loader(Points(size), 2, collate_fn=collate_to_dict)
    for handler in (pairs, dicts):
        handler.train(1)
        handler.save("forward.pt")
        assert "0.weight" in torch.load("forward.pt", weights_only=True)["model"]
    assert torch.equal(flat(pairs.model), flat(dicts.model))
    expected = pairs.predict(Points(7), 2)
    predicted = dicts.predict(Points(7), 2, collate_fn=collate_to_dict)
    assert predicted is expected is None if rank() else torch.equal(predicted, expected)


def check_ddp_options_reach_ddp():
    model = job(ddp_options={"gradient_as_bucket_view": True, "bucket_cap_mb": 7}).model
    if dist.is_initialized():
        assert model.gradient_as_bucket_view and model.bucket_bytes_cap == 7 * 2**20
    for wrong in ("no_such_option", "device_ids"):  # on one process too
        with pytest.raises(TypeError, match=wrong):
            job(ddp_options={wrong: None})


# Existing loaders


def counting_collate(items):
    counting_collate.calls += 1
    return torch.utils.data.default_collate(items)


class LibraryLoader(DataLoader):
    """A loader class like those of libraries, which sets its own collate_fn."""

    def __init__(self, data, *args, **kwargs):
        super().__init__(data, *args, collate_fn=counting_collate, **kwargs)


def check_an_existing_loader_is_rebuilt_with_a_rank_aware_sampler():
    data = Points(12 * world_size(), noise=0.5)
    expected = job(len(data), 3, noise=0.5)
    expected.train(2)
    counting_collate.calls = 0
    for loader in (
        LibraryLoader(data, batch_size=3, shuffle=True),
        LibraryLoader(data, 3, shuffle=True, num_workers=1, drop_last=True),
    ):
        handler = job()
        handler.train_loader = loader
        rebuilt = handler.train_loader
        assert rebuilt is not loader and rebuilt.batch_size == 3
        assert (rebuilt.num_workers, rebuilt.drop_last) == (loader.num_workers, loader.drop_last)
        handler.train(2)
        assert torch.equal(flat(handler.model), flat(expected.model))
    assert counting_collate.calls == 2 * 4  # the second loader calls it in its worker
    in_order = job()
    in_order.set_train_loader(DataLoader(data, 4))
    drawn = [target for _, part in in_order.train_loader for target in part.tolist()]
    assert drawn == data.targets[rank() :: world_size()].tolist()
    in_order.train_loader = in_order.train_loader  # a loader from train_loader keeps its order
    drawn_again = [target for _, part in in_order.train_loader for target in part.tolist()]
    assert drawn_again == drawn


class Graphs(DataLoader):
    def __iter__(self):
        return iter([])


class Neighbors(DataLoader):
    def _get_iterator(self):  # like PyTorch Geometric's NeighborLoader
        return iter([])


def check_loaders_that_cannot_be_sharded_are_refused():
    data, handler = Points(12), job()
    for cls in (Graphs, Neighbors):
        with pytest.raises(ValueError, match=f"{cls.__name__} makes its batches in its own"):
            handler.train_loader = cls(data, 3)
    subset_loader = DataLoader(data, 3, sampler=torch.utils.data.SubsetRandomSampler(range(6)))
    with pytest.raises(ValueError, match="a SubsetRandomSampler may not: pass a Subset"):
        handler.val_loader = subset_loader
    if dist.is_initialized():
        for sampler in (subset_loader.sampler, RandomSampler(data, replacement=True)):
            name = type(sampler).__name__
            with pytest.raises(ValueError, match=f"rank {rank()} of .* this {name} is"):
                handler.train_loader = DataLoader(data, 3, sampler=sampler)
    else:
        handler.train_loader = subset_loader
        assert len(list(handler.train_loader)) == 2
    handler.val_loader = DataLoader(data, 5, sampler=DistributedSampler(data, 2, 0, shuffle=False))
    seen = torch.cat([t for _, t in handler.val_loader]) if len(handler.val_loader) else None
    assert torch.equal(seen, data.targets[rank() :: world_size()])  # each item once
    handler.val_loader = None
    with pytest.raises(ValueError, match="call set_val_loader first"):
        handler.validate()
    with pytest.raises(ValueError, match="must be one data set, not a dict of a, b: pass one"):
        handler.set_train_loader({"a": data, "b": data})
    with pytest.raises(ValueError, match="one data set, not a list of DataLoader: pass one"):
        handler.set_val_loader([DataLoader(data, 2)], 2)
    with pytest.raises(ValueError, match="steps_per_epoch is for data without a length"):
        handler.set_train_loader(data, 2, steps_per_epoch=3)


# Streams


class StepsLeft(Callback):
    def __init__(self):
        self.counts = []

    def on_epoch_start(self):
        self.counts.append(self.handler.steps_left)

    on_step_end = on_epoch_start


class Stream(IterableDataset):
    """A stream of numbers that is longer on ranks with a higher number."""

    def __init__(self):
        self.epochs = []

    def set_epoch(self, epoch):
        self.epochs.append(epoch)

    def __iter__(self):
        for index in range(7 + rank()):
            yield torch.full((4,), float(index)), index % 2


def check_ranks_take_the_same_number_of_steps_from_streams_of_different_lengths():
    seen = []

    def record_batch(model, batch):
        if model.training and torch.is_grad_enabled():
            seen.append(batch[0][:, 0].long().tolist())
        return model(batch[0]), batch[1]

    handler = job(forward=record_batch, callbacks=[left := StepsLeft()], accumulate=2)
    if dist.is_initialized():
        with pytest.raises(
            ValueError, match="data without a length may differ between ranks: pass steps_per_epoch"
        ):
            handler.set_train_loader(Stream(), 2)
    handler.set_train_loader(stream := Stream(), 2, steps_per_epoch=2, drop_last=True)
    handler.train(3)
    assert stream.epochs == [0, 1, 2]
    assert handler.step == 6 and left.counts == [2, 1, 0] * 3 and len(handler.train_losses) == 3
    # Training takes 12 batches. A stream has 3 or 4, so it starts again when it ends, but not at
    # the start of an epoch, which continues it.
    one_pass = [[0, 1], [2, 3], [4, 5], [6, 7]][: (7 + rank()) // 2]
    assert seen == (one_pass * 12)[:12]
    assert_same_on_all_ranks(flat(handler.model))
    handler.save("stream.pt")
    handler.load("stream.pt")  # the stream starts again, as in a new process
    seen.clear()
    handler.train(4)
    assert seen[-4:] == (one_pass * 4)[:4]  # before these, DDP's warm-up used the first batch

    class Empty(IterableDataset):
        def __iter__(self):
            return iter(())

    handler.set_train_loader(Empty(), 2, steps_per_epoch=1)
    with pytest.raises(ValueError, match="the stream gave no batch"):
        handler.train(5)


# Outputs and metrics


class ManyKinds(nn.Linear):
    kind, kept = "dict", torch.empty(2, 2)

    def forward(self, inputs):
        out = super().forward(inputs)
        if self.kind == "dict":
            return {"loss": out.mean(), "logits": out, "first": out[:, 0], "name": "left out"}
        if self.kind == "tuple":
            return out, out.mean(), [str(index) for index in range(len(out))]
        if self.kind == "kept":  # a model that uses the same memory for every batch
            return self.kept[: len(out)].copy_(out)
        if self.kind == "lists":
            return [row[: 1 + index] for index, row in enumerate(out)]
        return {"loss": out.mean()} if self.kind == "loss" else out.mean(0)


def check_outputs_of_many_kinds_are_copied_and_split_into_items():
    torch.manual_seed(0)
    data = Points(7)
    handler = job(model=ManyKinds(4, 2))
    model = handler._unwrapped
    with torch.no_grad():
        logits = nn.functional.linear(data.inputs, model.weight, model.bias)
    predicted = handler.predict(data, 2)
    if handler.rank == 0:
        assert [list(entry) for entry in predicted] == [["logits", "first"]] * 7
        assert torch.allclose(torch.stack([entry["logits"] for entry in predicted]), logits)
        assert torch.allclose(torch.stack([e["first"] for e in predicted]), logits[:, 0])
    model.kind = "tuple"
    predicted = handler.predict(data, 2)
    if handler.rank == 0:
        rows, names = zip(*predicted, strict=True)
        assert torch.allclose(torch.stack(rows), logits) and {*names} == {"0", "1"}
    model.kind = "kept"
    predicted = handler.predict(data, 2)
    assert handler.rank or torch.allclose(predicted, logits)
    model.kind = "lists"
    predicted = handler.predict(data, 1)
    assert handler.rank or [len(row) for row in predicted] == [1] * 7
    for kind, error, text in (
        ("loss", TypeError, "outputs must be tensors with one row per item.* not dict"),
        ("mean", ValueError, "2 outputs for .* items: return one row per item"),
    ):
        model.kind = kind
        with pytest.raises(error, match=text):
            handler.predict(Points(3 * world_size()), 3)


class F1:
    """An F1 score like torchmetrics': computed from counts over all samples, not as a mean."""

    def __init__(self):
        self.reset()

    def reset(self):
        self.counts = torch.zeros(3, dtype=torch.float64)

    def update(self, outputs, targets):
        assert not outputs.requires_grad
        right, wrong = outputs.argmax(1), targets
        both = [(right & wrong).sum(), (right & ~wrong & 1).sum(), (~right & wrong & 1).sum()]
        self.counts += torch.stack(both).double()

    def compute(self):
        counts = reduce_sum({"n": self.counts})["n"] if dist.is_initialized() else self.counts
        return 2 * counts[0] / (2 * counts[0] + counts[1] + counts[2])

    def state_dict(self):
        return {"counts": self.counts.clone()}

    def load_state_dict(self, state):
        self.counts = state["counts"].clone()


def f1_of(model, data):
    predicted, targets = model(data.inputs).argmax(1), data.targets
    return 2 * (predicted & targets).sum().item() / (predicted + targets).sum().item()


def check_metric_objects_are_exact_on_uneven_data_and_resume_within_an_epoch():
    torch.manual_seed(0)
    handler = job(24 * world_size(), 2, metrics={"f1": F1()}, lr=0.0, callbacks=[SaveEach()])
    for size in (1 + 2 * world_size(), 17):
        data = Points(size)
        handler.set_val_loader(data, 2)
        assert handler.validate()["f1"] == pytest.approx(f1_of(handler._unwrapped, data), rel=1e-12)
    handler.train(1)
    data = Points(24 * world_size())
    expected = f1_of(handler._unwrapped, data)
    assert 0 < expected < 1
    assert handler.train_metrics == {"f1": [pytest.approx(expected, rel=1e-12)]}
    assert handler.val_metrics == {"f1": [handler.validate()["f1"]]}
    resumed = job(24 * world_size(), 2, metrics={"f1": F1()}, lr=0.0)
    resumed.load("5.pt")
    resumed.train(1)
    assert resumed.train_metrics == handler.train_metrics


def check_resuming_warns_about_a_metric_object_without_state():
    class Stateless(F1):
        state_dict = load_state_dict = property()  # as if it had neither

    job(8 * world_size(), 2, metrics={"f1": Stateless()}, callbacks=[SaveEach()]).train(1)
    resumed = job(8 * world_size(), 2, metrics={"f1": Stateless()})
    with pytest.warns(UserWarning, match="no state_dict, so this epoch's value .* the resume: f1"):
        resumed.load("2.pt")


class Collects(nn.Module):
    """A metric object that collects lists, as torchmetrics' AUROC does."""

    def __init__(self):
        super().__init__()
        self.f1, self.metric_state = F1(), {"outputs": []}

    def update(self, outputs, targets):
        self.metric_state["outputs"].append(outputs)
        self.f1.update(outputs, targets)

    def reset(self):
        self.metric_state["outputs"].clear()
        self.f1.reset()

    def compute(self):
        return self.f1.compute()


def check_a_rank_without_samples_is_an_error_on_all_ranks_only_if_a_metric_collects_lists():
    f1 = job(8 * world_size(), 2, metrics={"f1": F1()})
    lists = job(8 * world_size(), 2, metrics={"lists": Collects()})
    for handler, name in ((f1, "f1"), (lists, "lists")):
        handler.set_val_loader(Points(world_size()), 2)
        assert 0 <= handler.validate()[name] <= 1
    data = Points(world_size() - 1)
    for handler in (f1, lists):
        handler.set_val_loader(data, 2)
    if dist.is_initialized():
        expected = f1_of(f1._unwrapped, data)
        assert f1.validate()["f1"] == pytest.approx(expected, rel=1e-12, nan_ok=True)
        with pytest.raises(ValueError, match="some ranks have no sample for metric 'lists'"):
            lists.validate()
    else:
        assert math.isnan(f1.validate()["f1"]) and math.isnan(lists.validate()["lists"])
    assert_same_on_all_ranks(torch.ones(1))  # the group is usable


# Custom training loops


def check_a_custom_loop_of_the_same_parts_gives_the_same_weights():
    size = 11 * world_size() - 1
    expected = job(size, 3, noise=0.5)
    expected.train(2)
    info = initialize_ddp()
    model = wrap_model(network(), info.device, bucket_cap_mb=1)
    assert isinstance(model, DistributedDataParallel) == info.distributed
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loader = train_loader(Points(size, noise=0.5), 3)
    for epoch in range(2):
        loader.sampler.set_epoch(epoch)
        for inputs, targets in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs), targets).backward()
            optimizer.step()
    assert torch.equal(flat(model), flat(expected.model))
    count = sum(len(targets) for _, targets in eval_loader(Points(13), 2))
    assert reduce_sum({"items": float(count)})["items"] == 13


class KeepsItsOwn(nn.Module):
    """A model with a buffer that differs between ranks, also in its length."""

    def __init__(self):
        super().__init__()
        self.layers = network()
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("queue", torch.full((2 + rank(),), float(rank())))

    def forward(self, inputs):
        return self.layers(self.norm(inputs))


def check_buffers_that_ddp_leaves_to_each_rank_stay_as_they_are():
    for ignore in (False, True):
        model = KeepsItsOwn()
        if ignore:
            model._ddp_params_and_buffers_to_ignore = ["queue"]
        handler = job(8 * world_size(), 2, model=model, ddp_options={"broadcast_buffers": ignore})
        handler.set_val_loader(Points(5), 2)
        handler.train(1)
        handler.predict(Points(5), 2)
        assert model.queue.tolist() == [rank()] * (2 + rank())
        means = [torch.empty_like(model.norm.running_mean) for _ in range(world_size())]
        if dist.is_initialized():  # BatchNorm's are rank 0's only if DDP copies them
            dist.all_gather(means, model.norm.running_mean)
            assert torch.equal(means[0], means[-1]) == ignore


def check_a_weighted_mean_may_have_any_number_as_its_count():
    """With class weights, the loss is a mean over the sum of the weights."""
    weight = torch.tensor([0.3, 2.5])
    loss_fn, data = nn.CrossEntropyLoss(weight), Points(12 * world_size())
    model = network()
    handler = Handler(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        loss_fn,
        count=lambda batch: weight[batch[1]].sum(),
        device="cpu",
    )
    handler.set_train_loader(data, 12, shuffle=False)
    handler.train(1)
    one = network()
    loss_fn(one(data.inputs), data.targets).backward()
    torch.optim.SGD(one.parameters(), lr=0.1).step()
    assert torch.allclose(flat(handler.model), flat(one), rtol=1e-5, atol=1e-7)


class Smoothed(nn.Module):
    """A loss with a state: it divides by a running mean of the losses so far."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.ones(()))

    def forward(self, outputs, targets):
        loss = nn.functional.cross_entropy(outputs, targets)
        if torch.is_grad_enabled():
            self.mean.mul_(0.9).add_(0.1 * loss.detach())
        return loss / self.mean.clone()


def check_a_loss_with_a_state_and_a_forward_that_changes_its_batch_resume_exactly():
    def shifted(model, batch):
        inputs, targets = batch
        return model(inputs.sub_(0.5)), targets

    def handler_of(**options):
        model = network()
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        handler = Handler(model, sgd, Smoothed(), forward=shifted, device="cpu", **options)
        handler.set_train_loader(Points(8 * world_size()), 2)
        return handler

    whole = handler_of(callbacks=[SaveEach()])
    whole.train(2)
    resumed = handler_of()
    resumed.load("3.pt")
    resumed.train(2)
    assert torch.equal(flat(resumed.model), flat(whole.model))
    assert resumed.history == whole.history
    assert torch.equal(resumed.loop.task.loss_fn.mean, whole.loop.task.loss_fn.mean)


def check_a_static_graph_resumes_exactly():
    """DDP builds its final buckets after two steps. They decide in which order ranks are summed."""

    def static(**options):
        wide = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Linear(64, 2))
        torch.manual_seed(7)
        for layer in (wide[0], wide[2], wide[3]):
            nn.init.normal_(layer.weight)
        options = {"ddp_options": {"static_graph": True}} | options
        return job(8 * world_size(), 2, model=wide, **options)

    whole = static(callbacks=[SaveEach()])
    whole.train(1)
    for step in (1, 2, 3):
        resumed = static()
        resumed.load(f"{step}.pt")
        resumed.train(1)
        assert torch.equal(flat(resumed.model), flat(whole.model)), step


def check_training_stops_exactly_at_max_steps_and_goes_on_from_there():
    whole, stopped = job(8 * world_size(), 2), job(8 * world_size(), 2, sync_every=10)
    whole.train(3)
    for steps in (4, 6, 6, 8, 9):  # an epoch has four steps
        stopped.train(3, max_steps=steps)
        assert (stopped.step, stopped.epoch) == (steps, steps // 4)
    stopped.train(3)
    assert stopped.history == whole.history
    assert torch.equal(flat(stopped.model), flat(whole.model))


def check_numbers_of_numpy_are_saved_as_plain_numbers():
    def half(optimizer):
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda e: np.float64(0.5) ** e)

    metrics = {"score": lambda outputs, targets: np.float64(0.25)}
    options = {"scheduler": half, "metrics": metrics, "seed": np.int64(3)}
    whole = job(8 * world_size(), 2, callbacks=[Checkpoint("numpy")], **options)
    whole.train(2)
    handler = job(8 * world_size(), 2, **options)
    handler.load("numpy")
    assert handler.history == whole.history and handler.history["train_score"] == [0.25] * 2
    assert type(handler.optimizer.param_groups[0]["lr"]) is float


class Batched(Dataset):
    """A data set that looks up a whole batch at once, like those of Hugging Face."""

    def __init__(self):
        self.asked = []

    def __len__(self):
        return 4 * world_size()

    def __getitem__(self, index):
        return torch.ones(4) * torch.rand(()), index % 2

    def __getitems__(self, indices):
        self.asked.append(indices)
        return [(torch.ones(4) * torch.rand(()), index % 2) for index in indices]


def check_a_data_sets_own_getitems_is_used_but_not_that_of_subset():
    data = Batched()

    def numbers(data):
        loader = train_loader(data, 2, shuffle=False)
        return torch.cat([inputs[:, 0] for inputs, _ in loader]).tolist()

    first = numbers(data)
    assert [len(indices) for indices in data.asked] == [2, 2]
    assert numbers(data) == first and len(set(first)) == 4  # the draws are seeded
    data.asked.clear()
    assert len(set(numbers(Subset(data, range(len(data)))))) == 4 and not data.asked


def check_an_error_in_a_per_epoch_scheduler_does_not_lose_the_epoch():
    """The checkpoint is written before the scheduler steps; a resumed run takes that step first."""

    class Breaks(torch.optim.lr_scheduler.ExponentialLR):
        broken = True

        def step(self, epoch=None):
            if self.broken and self.last_epoch == 0:
                raise KeyError("of the scheduler")
            super().step()

    def make(**options):
        size, folder = 8 * world_size(), Path("scheduler")
        return job(size, 2, scheduler=lambda o: Breaks(o, 0.5), run_dir=folder, **options)

    handler = make()
    with pytest.raises(KeyError, match="of the scheduler"):
        handler.train(4)
    resumed = make()
    resumed.load("scheduler")
    assert resumed.epoch == 1 and resumed.optimizer.param_groups[0]["lr"] == 0.1
    resumed.scheduler.broken = False
    rates = []

    class Rates(Callback):
        def on_epoch_start(self):
            rates.append(self.handler.optimizer.param_groups[0]["lr"])

    resumed.callbacks.append(rate := Rates())
    rate.handler = resumed
    resumed.train(4)
    assert rates == [0.05, 0.025, 0.0125] and resumed.scheduler.last_epoch == 4


if __name__ == "__main__":
    run_checks(globals())
