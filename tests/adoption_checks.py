"""Checks of what real code brings to Handler; test_adoption.py starts the ranks, and is one itself.

Batches of any shape, token counts, existing loaders, streams, metric objects, loops of one's own.
"""

import math
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from handler_checks import SaveEach, assert_same_on_all_ranks, gloo_calls, rank, world_size
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
    Handler,
    eval_loader,
    initialize_ddp,
    reduce_sum,
    train_loader,
    wrap_model,
)

# Sentences of different lengths: a batch has as many rows as its sentences have tokens


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


def joined(items):
    """Return all tokens of some sentences as a batch of dicts."""
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
    """Return the mean; of no token, a zero with gradients of zero."""
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
    batch = joined(items)
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
        handler.set_train_loader(items, batch_size, collate_fn=joined, shuffle=False)
        handler.set_val_loader(items, batch_size, collate_fn=joined)
        whole = handler.evaluate([joined(items)])
        assert handler.validate() == {name: pytest.approx(whole[name], rel=1e-12) for name in whole}
        handler.train(1)
        assert handler.step == 1
        assert (flat(handler.model) - weights).abs().max() < 1e-14
        assert handler.train_losses == [pytest.approx(loss, rel=1e-13)]
        assert handler.train_metrics["right"] == [pytest.approx(right, rel=1e-12)]
    # Without `count`, ranks and batches have equal weight.
    handler = tagger(count=lambda batch: torch.tensor(1))
    handler.set_train_loader(items, 2, collate_fn=joined, shuffle=False)
    handler.accumulate = 4
    handler.train(1)
    assert (flat(handler.model) - weights).abs().max() > 1e-4


def check_a_count_costs_one_all_reduce_per_step():
    items = sentences(12 * world_size())

    def calls(**options):
        handler = tagger(**options)
        handler.set_train_loader(items, 3, collate_fn=joined)
        return gloo_calls(lambda: handler.train(1))

    with_count = calls()
    without = calls(count=None, forward=lambda m, b: (m(b["words"]), b["classes"]))
    expected = {"gloo:all_reduce": 4} if dist.is_initialized() else {}
    assert with_count - without == Counter(expected) and not without - with_count


def named(items):
    inputs, targets = torch.utils.data.default_collate(items)
    return {"inputs": inputs, "extra": "a text", "targets": targets}


def check_forward_is_how_a_batch_meets_the_model_and_names_stay_the_models():
    size = 8 * world_size()
    pairs, dicts = job(size, 2), job(size, 2, forward=lambda m, b: (m(b["inputs"]), b["targets"]))
    dicts.set_train_loader(Points(size), 2, collate_fn=named)
    for handler in (pairs, dicts):
        handler.train(1)
        handler.save("forward.pt")
        assert "0.weight" in torch.load("forward.pt", weights_only=True)["model"]
    assert torch.equal(flat(pairs.model), flat(dicts.model))
    expected = pairs.predict(Points(7), 2)
    predicted = dicts.predict(Points(7), 2, collate_fn=named, num_workers=1)
    assert predicted is expected is None if rank() else torch.equal(predicted, expected)


def check_ddp_options_reach_ddp_and_the_argument_wins_over_the_variable():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DDP_FIND_UNUSED_PARAMETERS", "1")
        options = {"gradient_as_bucket_view": True, "bucket_cap_mb": 7}
        both = [job(ddp_options=options), job(ddp_options={"find_unused_parameters": False})]
    if dist.is_initialized():
        assert both[0].model.gradient_as_bucket_view and both[0].model.find_unused_parameters
        assert both[0].model.bucket_bytes_cap == 7 * 2**20
        assert not both[1].model.find_unused_parameters
    for wrong in ("no_such_option", "device_ids"):  # on one process, too
        with pytest.raises(TypeError, match=wrong):
            job(ddp_options={wrong: None})


# Existing loaders


def pairs_of(items):
    pairs_of.calls += 1
    return torch.utils.data.default_collate(items)


class Own(DataLoader):
    """A loader class of a library, with a collate_fn that it makes by itself."""

    def __init__(self, data, *args, **kwargs):
        super().__init__(data, *args, collate_fn=pairs_of, **kwargs)


def check_an_existing_loader_is_rebuilt_with_a_sampler_of_the_ranks():
    data = Points(12 * world_size(), noise=0.5)
    expected = job(len(data), 3, noise=0.5)
    expected.train(2)
    pairs_of.calls = 0
    for loader in (
        Own(data, batch_size=3, shuffle=True),
        Own(data, 3, shuffle=True, num_workers=1, drop_last=True),
    ):
        handler = job()
        handler.train_loader = loader
        made = handler.train_loader
        assert made is not loader and made.batch_size == 3
        assert (made.num_workers, made.drop_last) == (loader.num_workers, loader.drop_last)
        handler.train(2)
        assert torch.equal(flat(handler.model), flat(expected.model))
    assert pairs_of.calls == 2 * 4  # the other loader's are its worker's
    in_order = job()
    in_order.set_train_loader(DataLoader(data, 4))
    drawn = [target for _, part in in_order.train_loader for target in part.tolist()]
    assert drawn == data.targets[rank() :: world_size()].tolist()
    in_order.train_loader = in_order.train_loader  # ours already: its order stays
    again = [target for _, part in in_order.train_loader for target in part.tolist()]
    assert again == drawn
    resumed = job()
    resumed.set_train_loader(Own(data, 3, shuffle=True))
    expected.save("loader.pt")
    resumed.load("loader.pt")
    resumed.train(3)
    expected.train(3)
    assert torch.equal(flat(resumed.model), flat(expected.model))


class Graphs(DataLoader):
    def __iter__(self):
        return iter([])


class Neighbors(DataLoader):
    def _get_iterator(self):  # as PyTorch Geometric's NeighborLoader
        return iter([])


def check_loaders_that_cannot_be_sharded_are_refused():
    data, handler = Points(12), job()
    for own in (Graphs, Neighbors):
        with pytest.raises(ValueError, match=f"{own.__name__} makes its batches in its own"):
            handler.train_loader = own(data, 3)
    some = DataLoader(data, 3, sampler=torch.utils.data.SubsetRandomSampler(range(6)))
    with pytest.raises(ValueError, match="a SubsetRandomSampler may not: pass a Subset"):
        handler.val_loader = some
    theirs = DistributedSampler(data, 9, 4)
    if dist.is_initialized():
        for sampler in (some.sampler, RandomSampler(data, replacement=True), theirs):
            name = type(sampler).__name__
            with pytest.raises(ValueError, match=f"rank {rank()} of .* this {name} is"):
                handler.train_loader = DataLoader(data, 3, sampler=sampler)
    else:
        handler.train_loader = some
        assert len(list(handler.train_loader)) == 2
    handler.val_loader = DataLoader(data, 5, sampler=DistributedSampler(data, 2, 0, shuffle=False))
    seen = torch.cat([t for _, t in handler.val_loader]) if len(handler.val_loader) else None
    assert torch.equal(seen, data.targets[rank() :: world_size()])  # each item once
    handler.val_loader = None
    with pytest.raises(ValueError, match="call set_val_loader first"):
        handler.validate()
    for set_loader in (handler.set_train_loader, handler.set_val_loader):
        with pytest.raises(ValueError, match="must be one data set, not a dict of a, b: pass one"):
            set_loader({"a": data, "b": data}, 2)
        with pytest.raises(ValueError, match="must be one data set, not a dict of a: pass one"):
            set_loader({"a": data})
        with pytest.raises(ValueError, match="one data set, not a list of DataLoader: pass one"):
            set_loader([DataLoader(data, 2)], 2)
    with pytest.raises(ValueError, match="steps_per_epoch is for an IterableDataset"):
        handler.set_train_loader(data, 2, steps_per_epoch=3)


# Streams


class Stream(IterableDataset):
    """Each rank's own numbers; the ranks' streams have different lengths."""

    def __init__(self):
        self.number = 0

    def __iter__(self):
        for index in range(7 + rank()):
            yield torch.full((4,), float(index)), index % 2


def check_ranks_take_as_many_steps_of_streams_that_end_unevenly():
    seen = []

    class Keeps(Callback):
        def on_step_end(self):
            self.handler.left.append(self.handler.steps_left)

    def note(model, batch):
        if model.training and torch.is_grad_enabled():
            seen.append(batch[0][:, 0].long().tolist())
        return model(batch[0]), batch[1]

    handler = job(forward=note, callbacks=[Keeps()], accumulate=2)
    handler.left = []
    if dist.is_initialized():
        with pytest.raises(
            ValueError, match=r"an IterableDataset on . ranks needs steps_per_epoch"
        ):
            handler.set_train_loader(Stream(), 2)
    handler.set_train_loader(Stream(), 2, steps_per_epoch=2, drop_last=True)
    handler.train(3)
    assert handler.step == 6 and handler.left == [1, 0] * 3 and len(handler.train_losses) == 3
    # 12 batches of a stream that gives 3 or more in each round, and goes on in the next epoch.
    rounds = [[0, 1], [2, 3], [4, 5], [6, 7]][: (7 + rank()) // 2]
    assert seen == (rounds * 12)[:12]
    assert_same_on_all_ranks(flat(handler.model))
    handler.save("stream.pt")
    handler.loop.state.samples_seen = 4
    with pytest.warns(UserWarning, match="epoch 4 starts again"):
        handler.train(4)
    assert handler.step == 8 and handler.epoch == 4
    handler.load("stream.pt")  # from the beginning, as in a new process
    seen.clear()
    handler.train(4)
    assert seen[-4:] == (rounds * 4)[:4]  # after DDP's warm-up, which takes the first batch

    class Empty(IterableDataset):
        def __iter__(self):
            return iter(())

    handler.set_train_loader(Empty(), 2, steps_per_epoch=1)
    with pytest.raises(ValueError, match="the stream gave no batch"):
        handler.train(5)


# Outputs and metrics


@dataclass
class Outputs:
    loss: torch.Tensor
    logits: torch.Tensor
    layers: tuple
    name: str = "left out"


class Many(nn.Linear):
    kind = "dataclass"

    def forward(self, inputs):
        out = super().forward(inputs)
        if self.kind == "dataclass":
            return Outputs(out.mean(), out, (out, out[:, 0]))
        if self.kind == "lists":
            return [row[: 1 + index] for index, row in enumerate(out)]
        return {"loss": out.mean()} if self.kind == "loss" else out.mean(0)


class Reuses(nn.Linear):
    """Returns the same tensor for each batch, with other numbers."""

    def forward(self, inputs):
        outputs = super().forward(inputs)
        if not hasattr(self, "kept"):
            self.kept = torch.empty_like(outputs)
        return self.kept[: len(outputs)].copy_(outputs)


def check_an_output_that_the_model_overwrites_is_copied():
    handler = job(model=Reuses(4, 2))
    data = Points(6 * world_size())
    predicted = handler.predict(data, 2)
    with torch.no_grad():
        expected = nn.functional.linear(data.inputs, *handler._unwrapped.parameters())
    assert handler.rank or torch.allclose(predicted, expected)


def check_outputs_of_any_kind_are_split_into_items():
    torch.manual_seed(0)
    data = Points(7)
    handler = job(model=Many(4, 2))
    model = handler._unwrapped
    with torch.no_grad():
        logits = nn.functional.linear(data.inputs, model.weight, model.bias)
    predicted = handler.predict(data, 2, num_workers=1)
    if handler.rank == 0:
        assert [list(entry) for entry in predicted] == [["logits", "layers"]] * 7
        assert torch.allclose(torch.stack([entry["logits"] for entry in predicted]), logits)
        assert torch.allclose(torch.stack([e["layers"][1] for e in predicted]), logits[:, 0])
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
    """An F1 score as torchmetrics has it: not a mean over samples, but counted over all of them."""

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
    metric = F1()
    with torch.no_grad():
        metric.update(model(data.inputs), data.targets)
    counts = metric.counts
    return (2 * counts[0] / (2 * counts[0] + counts[1] + counts[2])).item()


def check_metric_objects_are_exact_on_uneven_data_and_taken_up_with_the_epoch():
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


def check_a_metric_object_without_a_state_is_told_of_on_resume():
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


def check_a_rank_without_a_sample_is_an_error_of_all_only_if_a_metric_collects_lists():
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


def check_a_metric_object_must_return_one_number():
    class Two(F1):
        def compute(self):
            return torch.ones(2)

    with pytest.raises(ValueError, match="two must be one number"):
        job(4 * world_size(), 2, metrics={"two": Two()}).train(1)


# Loops of one's own


def check_a_loop_of_ones_own_with_the_same_parts_has_the_same_weights():
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


def check_another_device_than_the_groups_is_refused():
    if dist.is_initialized():
        with (
            pytest.MonkeyPatch.context() as patch,
            pytest.raises(ValueError, match=r"device=meta, but rank . of the open group uses cpu"),
        ):
            patch.setattr("ddp_ref.handler._resolve_device", torch.device)
            job(device="meta")
    assert job(device="cpu").device == torch.device("cpu")


def check_freezing_after_wrapping_is_a_warning():
    handler = job(4 * world_size(), 2, ddp_options={"find_unused_parameters": True})
    handler.train(1)
    for parameter in handler._unwrapped[0].parameters():
        parameter.requires_grad_(False)
    if dist.is_initialized():
        with pytest.warns(UserWarning, match="requires_grad has changed since DDP wrapped"):
            handler.train(2)
    handler.train(3)  # once


class Batched(Dataset):
    """A data set that looks up a batch at once, as those of Hugging Face do."""

    def __init__(self):
        self.asked = []

    def __len__(self):
        return 4 * world_size()

    def __getitem__(self, index):
        return torch.ones(4) * torch.rand(()), index % 2

    def __getitems__(self, indices):
        self.asked.append(indices)
        return [(torch.ones(4) * torch.rand(()), index % 2) for index in indices]


def check_a_data_sets_own_getitems_is_used_but_not_a_subsets():
    data = Batched()

    def numbers(data):
        loader = train_loader(data, 2, shuffle=False)
        return torch.cat([inputs[:, 0] for inputs, _ in loader]).tolist()

    first = numbers(data)
    assert [len(indices) for indices in data.asked] == [2, 2]
    assert numbers(data) == first and len(set(first)) == 4  # seeded
    data.asked.clear()
    assert len(set(numbers(Subset(data, range(len(data)))))) == 4 and not data.asked


def check_optimizer_state_made_at_construction_is_moved_and_resumed():
    """Adagrad's: only a GPU shows that it is moved; here, that it stays what it was."""
    data = Points(8 * world_size())

    def make():
        model = network()
        optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1, initial_accumulator_value=0.5)
        handler = Handler(model, optimizer, nn.functional.cross_entropy, device="cpu")
        handler.set_train_loader(data, 2)
        return handler

    def sums(handler):
        return [state["sum"].clone() for state in handler.optimizer.state.values()]

    saved, resumed = make(), make()
    assert len(sums(saved)) == 4 and all((part == 0.5).all() for part in sums(saved))
    saved.train(1)
    saved.save("adagrad.pt")
    resumed.load("adagrad.pt")
    assert all((part > 0.5).any() for part in sums(resumed))
    for handler in (saved, resumed):
        handler.train(2)
    assert torch.equal(flat(resumed.model), flat(saved.model))
    for own, other in zip(sums(resumed), sums(saved), strict=True):
        assert torch.equal(own, other)


def check_an_error_of_a_per_epoch_scheduler_costs_no_epoch():
    """The checkpoint is written before it steps, and a resumed run takes that step first."""

    class Breaks(torch.optim.lr_scheduler.ExponentialLR):
        broken = True

        def step(self, epoch=None):
            if self.broken and self.last_epoch == 1:
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
    assert resumed.epoch == 2 and resumed.optimizer.param_groups[0]["lr"] == 0.05
    resumed.scheduler.broken = False
    rates = []

    class Rates(Callback):
        def on_epoch_start(self):
            rates.append(self.handler.optimizer.param_groups[0]["lr"])

    resumed.callbacks.append(rate := Rates())
    rate.handler = resumed
    resumed.train(4)
    assert rates == [0.025, 0.0125] and resumed.scheduler.last_epoch == 4


if __name__ == "__main__":
    run_checks(globals())
