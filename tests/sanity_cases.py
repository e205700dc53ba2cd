"""The checks of scripts/sanity.py with right and wrong arguments; test_sanity.py starts the ranks.

Each function below has the name of the check that it tries.
"""

import math
import os
from contextlib import nullcontext
from functools import partial

import sanity
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DistributedSampler

from ddp_ref import cleanup_ddp, gather_objects, initialize_ddp

SIZE = 13  # no number of ranks or workers here divides it


def try_all():
    """Try every check on this rank.

    A single process does this twice: without a process group, then in a group of one.
    """
    if not try_each().distributed:
        cleanup_ddp()
        try_each(use_distributed=True)


def try_each(**options):
    few = torch.cuda.device_count() < int(os.environ["WORLD_SIZE"])
    info = initialize_ddp(backend="gloo" if few else None, **options)
    for name, cases in globals().items():
        if name.startswith("check_"):
            cases(getattr(sanity, name), info.rank, info.world_size, info.device)
    return info


def mistake(fewest, line, check, *arguments):
    """Fail unless the check raises on `fewest` ranks or more: the same line on all ranks.

    `line` is a part of it.
    """
    try:
        said = check(*arguments)
    except AssertionError as error:
        said = str(error)
    every = gather_objects(said, to_all=True)
    assert set(every) == {said}, every
    assert (said is not None) == (len(every) >= fewest), said
    assert said is None or (line in said and "\n" not in said), said


healthy = partial(mistake, math.inf, "")


def check_samples_drawn_once(check, rank, world, device):
    shard = list(DistributedSampler(range(SIZE), world, rank, seed=1))
    dropped = DistributedSampler(range(SIZE), world, rank, drop_last=True)
    healthy(check, shard, SIZE)
    healthy(check, list(dropped), SIZE, SIZE % world)
    mistake(2, "draws of 13 samples, sample 0", check, range(SIZE), SIZE)
    mistake(1, "samples were not drawn, such as", check, shard[1:], SIZE)


def check_stream_read_once(check, rank, world, device):
    shard = list(range(SIZE)[rank::world])
    repeated = "13 of 13 items were read more than once, item 0"
    healthy(check, shard, SIZE)
    mistake(1, f"{repeated} was read 2 times", check, shard * 2, SIZE)  # by both workers
    lost = [item for item in shard if item != 3]
    mistake(1, "12 of 13 items were read: shard by rank and by worker", check, lost, SIZE)


def check_epochs_differ(check, rank, world, device):
    sampler = DistributedSampler(range(100), world, rank)
    first, again = list(sampler), list(sampler)
    sampler.set_epoch(1)
    second = list(sampler)
    on_rank_0_only = second if rank == 0 and world > 1 else again
    healthy(check, first, second)
    mistake(1, "call sampler.set_epoch(epoch) on every rank", check, first, on_rank_0_only)


def check_augmentation_differs(check, rank, world, device):
    def draw(seed):
        return torch.rand(50, generator=torch.Generator().manual_seed(seed))

    workers_alike = torch.cat([draw(rank), draw(rank)])
    healthy(check, draw(rank))
    mistake(2, "only 50 of", check, draw(0))
    mistake(1, "random draws are different: seed a generator", check, workers_alike)


def check_same_split(check, rank, world, device):
    train, test = [*range(20)], [*range(20, 30)]
    healthy(check, train, test)
    mistake(2, "the ranks hold different splits of 30 items", check, train[: 20 - rank], test)
    leaked = train + test[:1]
    mistake(1, "1 of 10 test items are in the training set", check, leaked, torch.tensor(test))


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


def check_whole_batch_gradient(check, rank, world, device):
    inputs, labels = batch(world, device)
    start = rank * (rank + 1) // 2
    mine = slice(start, start + rank + 1)

    def after(scale, reduction):
        model = network(device)
        loss = F.cross_entropy(model(inputs[mine]), labels[mine], reduction=reduction)
        (loss * scale).backward()

        return model, lambda: F.cross_entropy(inner(model)(inputs), labels)

    healthy(check, *after(world / len(labels), "sum"))
    mistake(2, "local sum x world size / count of all ranks", check, *after(1, "mean"))
    mistake(1, "rank 0's gradient has norm nan", check, *after(float("nan"), "mean"))


def check_replicas_equal(check, rank, world, device):
    def changed(edit):
        model = network(device)
        with torch.no_grad():
            edit(inner(model)[2].weight)
        return model

    healthy(check, changed(lambda weight: weight))
    healthy(check, changed(lambda weight: weight.fill_(float("nan"))))
    differ = "1 of 4 parameters differ between rank 0 and rank 1, such as module.2.w"
    mistake(2, differ, check, changed(lambda weight: weight[0, 0].mul_(1 + rank * 2.0**-22)))
    other_layers = nn.Linear(2, 2, bias=rank == 0).to(device)
    mistake(2, "ranks have [1, 2] parameters", check, other_layers)


def check_metric_is_global(check, rank, world, device):
    values = torch.arange(SIZE, dtype=torch.float64) ** 2
    own = values[rank::world]
    padded = values[list(DistributedSampler(values, world, rank, shuffle=False))]
    exact = values.mean().item()
    mean_of_means = torch.stack([part.mean() for part in values.split(5)]).mean()
    healthy(check, exact, own.sum(), len(own), SIZE)
    mistake(2, "the ranks report", check, own.mean(), own.sum(), len(own), SIZE)
    mistake(1, "but sum / count is 50", check, mean_of_means, own.sum(), len(own))
    without_padding = "samples, not 13: shard without padding"
    mistake(2, without_padding, check, exact, padded.sum(), len(padded), SIZE)


def check_gradients_reduced(check, rank, world, device):
    inputs, labels = (values[rank : rank + 1] for values in batch(world, device))

    def after(forward=lambda model: model, backward=True, sync=True):
        model = network(device)
        no_sync = getattr(model, "no_sync", nullcontext)
        with nullcontext() if sync else no_sync():
            loss = F.cross_entropy(forward(model)(inputs), labels)
            if backward:
                loss.backward()
        return model

    healthy(check, after())
    mistake(2, "4 of 4 gradients differ between rank 0 and rank 1", check, after(inner))
    mistake(2, "outside no_sync", check, after(sync=False))
    mistake(2, "ranks have [0, 4] gradients", check, after(inner, backward=rank == 0))
    mistake(1, "no rank has a gradient", check, after(backward=False))
