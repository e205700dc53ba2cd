"""What each rank passes to the checks of scripts/sanity.py; test_sanity.py starts the ranks."""

from contextlib import nullcontext

import sanity
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, get_worker_info

from ddp_ref import cleanup_ddp, initialize_ddp

SIZE = 13  # no number of ranks or workers here divides it


def verdicts():
    """Call every check in every case on this rank; return what it said, by check and case.

    A single process does this twice: without a process group, then in a group of one.
    """
    info = initialize_ddp()
    answers = [all_answers(info)]
    if not info.distributed:
        cleanup_ddp()
        answers.append(all_answers(initialize_ddp(use_distributed=True)))
    return answers


def all_answers(info):
    answers = {}
    # All cases come first: in CPython 3.11.7, a worker forked just after a collective can hang.
    made = {c: cases(info.rank, info.world_size, info.device) for c, cases in CASES.items()}
    for check, cases in made.items():
        answers[check.__name__] = {}
        for name, arguments in cases.items():
            if callable(arguments):  # gradients are computed just before they are checked
                arguments = arguments()
            try:
                check(*arguments)
                answers[check.__name__][name] = None
            except AssertionError as error:
                answers[check.__name__][name] = str(error)
    return answers


def samples(rank, world, device):
    shard = DistributedSampler(range(SIZE), world, rank, seed=1)
    other_seed = DistributedSampler(range(SIZE), world, rank, seed=rank)
    dropped = DistributedSampler(range(SIZE), world, rank, drop_last=True)
    return {
        "": (list(shard), SIZE),
        "a tensor": (torch.tensor(list(shard)), SIZE),
        "dropped, as told": (list(dropped), SIZE, SIZE % world),
        "no sampler": (range(SIZE), SIZE),
        "seeded by rank": (list(other_seed), SIZE),
        "lost": (list(shard)[1:], SIZE),
    }


class Stream(IterableDataset):
    def __init__(self, rank, world, by_worker):
        self.rank, self.world, self.by_worker = rank, world, by_worker

    def __iter__(self):
        info = get_worker_info()
        worker, workers = (info.id, info.num_workers) if info and self.by_worker else (0, 1)
        return iter(range(SIZE)[self.rank * workers + worker :: self.world * workers])


def stream(rank, world, device):
    def read(*arguments):
        dataset = Stream(*arguments)
        return list(DataLoader(dataset, None, num_workers=2, multiprocessing_context="fork"))

    by_both = read(rank, world, True)
    return {
        "": (by_both, SIZE),
        "names": ([f"file {item}" for item in by_both], SIZE),
        "each rank reads all": (range(SIZE),),
        "workers repeat": (read(rank, world, False), SIZE),
        "lost": ([item for item in by_both if item != 3], SIZE),
    }


def epochs(rank, world, device):
    sampler = DistributedSampler(range(100), world, rank)
    first, again = list(sampler), list(sampler)
    sampler.set_epoch(1)
    second = list(sampler)
    return {
        "": (first, second),
        "no set_epoch": (first, torch.tensor(again)),
        "on rank 0 only": (first, second if rank == 0 and world > 1 else again),
    }


def augmentation(rank, world, device):
    def draw(seed):
        return torch.rand(50, generator=torch.Generator().manual_seed(seed))

    workers_alike = torch.cat([draw(rank), draw(rank)])
    return {"": (draw(rank),), "ranks alike": (draw(0),), "workers alike": (workers_alike,)}


def split(rank, world, device):
    def shuffled(seed):
        order = torch.randperm(30, generator=torch.Generator().manual_seed(seed)).tolist()
        return order[:20], order[20:]

    train, test = shuffled(0)
    return {
        "": (train, test),
        "seeded by rank": shuffled(rank),
        "one item less": (train[: 20 - rank], test),
        "overlap": (train + test[:1], torch.tensor(test)),
    }


def network(device):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)).to(device)
    if not dist.is_initialized():
        return model
    return DDP(model, device_ids=[device.index] if device.type == "cuda" else None)


def inner(model):
    return getattr(model, "module", model)


def batch(world, device):
    """Return the samples of all ranks; rank r has r + 1 of them."""
    torch.manual_seed(1)
    count = world * (world + 1) // 2
    return torch.randn(count, 4, device=device), torch.randint(3, (count,), device=device)


def whole_gradient(rank, world, device):
    inputs, labels = batch(world, device)
    start = rank * (rank + 1) // 2
    mine = slice(start, start + rank + 1)

    def after(scale, reduction, whole_reduction="mean"):
        def arguments():
            model = network(device)
            loss = F.cross_entropy(model(inputs[mine]), labels[mine], reduction=reduction)
            (loss * scale).backward()
            gradient = model if world == 1 else inner(model)

            def whole_loss():
                return F.cross_entropy(inner(model)(inputs), labels, reduction=whole_reduction)

            return gradient, whole_loss

        return arguments

    return {
        "": after(world / len(labels), "sum"),
        "a sum": after(1, "sum", "sum"),
        "a mean of unequal counts": after(1, "mean"),
        "divided by 5": after(1 / 5, "mean"),
        "not a number": after(float("nan"), "mean"),
    }


def replicas(rank, world, device):
    def changed(edit):
        model = network(device)
        with torch.no_grad():
            edit(inner(model)[2].weight)
        return (model,)

    return {
        "": changed(lambda weight: weight),
        "NaN on all": changed(lambda weight: weight.fill_(float("nan"))),
        "last bit": changed(lambda weight: weight[0, 0].mul_(1 + rank * 2.0**-22)),
        "two weights swapped": changed(lambda weight: weight.copy_(weight.roll(rank, 0))),
        "other layers": (nn.Linear(2, 2, bias=rank == 0).to(device),),
    }


def metric(rank, world, device):
    values = torch.arange(SIZE, dtype=torch.float64) ** 2
    own = values[rank::world]
    padded = values[list(DistributedSampler(values, world, rank, shuffle=False))]
    exact = values.mean().item()
    mean_of_means = torch.stack([part.mean() for part in values.split(5)]).mean()
    return {
        "": (exact, own.sum(), len(own), SIZE),
        "this rank's": (own.mean(), own.sum(), len(own), SIZE),
        "mean of means": (mean_of_means, own.sum(), len(own)),
        "padding": (exact, padded.sum(), len(padded), SIZE),
        "nothing": (0.0, 0.0, 0),
    }


def reduced(rank, world, device):
    inputs, labels = batch(world, device)
    inputs = inputs[rank : rank + 1]
    labels = labels[rank : rank + 1]

    def after(forward, *, sync=True):
        def arguments():
            model = network(device)
            no_sync = getattr(model, "no_sync", nullcontext)
            with nullcontext() if sync else no_sync():
                F.cross_entropy(forward(model)(inputs), labels).backward()
            return (model,)

        return arguments

    def without_gradients():
        model = network(device)
        if rank == 0:
            F.cross_entropy(inner(model)(inputs), labels).backward()
        return (model,)

    def sparse():
        table = nn.Embedding(3, 2, sparse=True)
        table(torch.tensor([1, 1])).sum().backward()
        return (table,)

    return {
        "": after(lambda model: model),
        **({"sparse": sparse} if device.type == "cpu" else {}),  # NCCL sends no sparse tensors
        "through module": after(inner),
        "no_sync": after(lambda model: model, sync=False),
        "rank 0 alone": without_gradients,
        "before backward": lambda: (network(device),),
    }


CASES = {
    sanity.check_samples_drawn_once: samples,
    sanity.check_stream_read_once: stream,
    sanity.check_epochs_differ: epochs,
    sanity.check_augmentation_differs: augmentation,
    sanity.check_same_split: split,
    sanity.check_whole_batch_gradient: whole_gradient,
    sanity.check_replicas_equal: replicas,
    sanity.check_metric_is_global: metric,
    sanity.check_gradients_reduced: reduced,
}
