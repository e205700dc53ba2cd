"""Nine checks for mistakes that DDP does not report. Copy this file into your own project.

    from sanity import check_gradients_reduced, check_replicas_equal
    check_gradients_reduced(ddp_model)  # on every rank, between backward() and optimizer.step()
    check_replicas_equal(ddp_model)  # on every rank, after each epoch

Every check is collective: all ranks call the same checks in the same order. A check returns None,
or it raises the same AssertionError on every rank, so no rank is left waiting. A single process can
call the checks, too. With nccl, call `torch.cuda.set_device(local_rank)` before the first check.

The file needs only PyTorch and NumPy, which PyTorch uses to send Python objects. The checks cost
time: they gather objects from all ranks and wait for the GPU. So call them in the first steps and
epochs, not in every step.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable
from itertools import chain
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn


def check_samples_drawn_once(drawn: Iterable, size: int, dropped: int = 0) -> None:
    """Check that the ranks together draw each sample exactly once per epoch.

    Every rank calls this after an epoch. The few samples that DistributedSampler repeats, to give
    all ranks equally many, are allowed.

    Args:
        drawn: The indices that this rank's loader drew, from 0 to size - 1.
        size: The number of samples in the whole data set.
        dropped: How many samples drop_last=True leaves out, on all ranks together.
    """
    parts = _gather(_plain(drawn))
    counts = Counter(chain(*parts))
    way_out = "use a DistributedSampler, with the same seed and the same epoch on every rank"
    if counts.total() - len(counts) > -size % len(parts):
        sample, times = counts.most_common(1)[0]
        seen = f"{counts.total()} draws of {size} samples, sample {sample} was drawn {times} times"
        _fail(seen, way_out)
    missing = [sample for sample in range(size) if sample not in counts]
    if len(missing) > dropped:
        _fail(f"{len(missing)} of {size} samples were not drawn, such as {missing[0]}", way_out)


def check_stream_read_once(items: Iterable, size: int | None = None) -> None:
    """Check that no two ranks or workers read the same item of an IterableDataset.

    Every rank passes an identifier for each item that it read in one pass, such as a line number or
    a URL. If you also pass `size`, the number of items in the stream, the check finds missing
    items, too.
    """
    counts = Counter(chain(*_gather(_plain(items))))
    way_out = "shard by rank and by worker (see torch.utils.data.get_worker_info)"
    repeated = [item for item, times in counts.items() if times > 1]
    if repeated:
        seen = f"{len(repeated)} of {len(counts)} items were read more than once"
        example = f"item {repeated[0]!r} was read {counts[repeated[0]]} times"
        _fail(f"{seen}, {example}", way_out)
    if size is not None and len(counts) != size:
        _fail(f"{len(counts)} of {size} items were read", way_out)


def check_epochs_differ(first: Iterable, second: Iterable) -> None:
    """Check that each rank draws its samples in a new order in each epoch.

    Every rank passes the indices that it drew in two epochs. The first few dozen are enough.
    """
    orders = _gather((_plain(first), _plain(second)))
    same = [rank for rank, (one, other) in enumerate(orders) if one == other]
    if same:
        seen = f"both epochs begin with {orders[same[0]][0][:4]} on rank {same[0]}"
        _fail(seen, "call sampler.set_epoch(epoch) on every rank before each epoch")


def check_augmentation_differs(draws: Iterable) -> None:
    """Check that the ranks and workers do not all draw the same random augmentation.

    Every rank passes one random draw for each of the first few hundred samples that it loads, from
    one epoch or several. Pass numbers that rarely come up twice: angles, not coin flips. Leave out
    the samples that DistributedSampler repeats at the end of an epoch.
    """
    counts = Counter(chain(*_gather(_plain(draws))))
    repeated = sum(times for times in counts.values() if times > 1)
    if repeated > counts.total() / 100:  # a few float32 numbers are equal by chance
        seen = f"only {len(counts)} of {counts.total()} random draws are different"
        _fail(seen, "seed a generator for each sample from a hash of (seed, epoch, index)")


def check_same_split(train: Iterable, test: Iterable) -> None:
    """Check that all ranks split the data in the same way, and that no rank trains on a test item.

    Every rank passes the indices (or names) of its whole training set and its whole test set,
    before they are sharded.
    """
    splits = _gather((set(_plain(train)), set(_plain(test))))
    trained, tested = (set().union(*parts) for parts in zip(*splits, strict=True))
    way_out = "use the same seed for the split on every rank, or broadcast rank 0's indices"
    if leaked := len(trained & tested):
        _fail(f"{leaked} of {len(tested)} test items are in the training set of a rank", way_out)
    if any(split != splits[0] for split in splits):
        _fail(f"the ranks hold different splits of {len(trained | tested)} items", way_out)


def check_whole_batch_gradient(
    model: nn.Module, whole_loss: Callable[[], Tensor], tolerance: float = 1e-3
) -> None:
    """Check that DDP's gradient is the one that a single process would compute on all samples.

    Every rank calls this between backward() and optimizer.step(), after a GradScaler's unscale_
    and before clipping. Put the model into eval() mode before forward: dropout and BatchNorm
    would make the two gradients differ.

    Args:
        model: The DDP model.
        whole_loss: A function that returns the loss of this step's samples from all ranks, or of
            the whole accumulation window. It must call `model.module`, not `model`. The whole
            batch has to fit on each rank, so test with a small one.
        tolerance: How far the gradient may be off, relative to the norm of the right one.
    """
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    right = torch.autograd.grad(whole_loss(), parameters, materialize_grads=True)
    own = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
    errors = [one - other for one, other in zip(own, right, strict=True)]
    lengths = [nn.utils.get_total_norm(tensors).item() for tensors in (errors, own, right)]
    for rank, (error, length, whole) in enumerate(_gather(lengths)):
        if not error <= tolerance * whole:  # written so that NaN fails, too
            seen = f"rank {rank}'s gradient has norm {length:.3g}, the whole batch's {whole:.3g}"
            way_out = "as the loss, use the local sum x world size / count of all ranks"
            _fail(f"{seen}, and their difference {error:.3g}", way_out)


def check_replicas_equal(model: nn.Module) -> None:
    """Check that all ranks have the same parameters, bit for bit. Buffers are not compared.

    Every rank passes its model, with or without DDP around it, after an optimizer step.
    """
    way_out = "call model(x), not model.module(x), and step only with reduced gradients"
    _require_equal("parameter", dict(model.named_parameters()), way_out)


def check_metric_is_global(value: float, total: float, count: int, size: int | None = None) -> None:
    """Check that a logged mean, such as an accuracy, covers all samples of all ranks.

    Every rank calls this, with its own numbers.

    Args:
        value: The mean that this rank would log.
        total: The sum of the metric over this rank's own samples.
        count: The number of this rank's own samples.
        size: The number of samples in the whole data set. With it, the check finds padding, too.
    """
    values, totals, counts = zip(*_gather((float(value), float(total), int(count))), strict=True)
    way_out = "shard without padding, all-reduce the sum and the count, then divide"
    if size is not None and sum(counts) != size:
        _fail(f"the ranks counted {sum(counts)} samples, not {size}", way_out)
    exact = sum(totals) / sum(counts) if sum(counts) else math.nan
    if not all(math.isclose(value, exact, rel_tol=1e-5) for value in values):
        reported = ", ".join(f"{value:.6g}" for value in values)
        _fail(f"the ranks report {reported}, but sum / count is {exact:.6g}", way_out)


def check_gradients_reduced(model: nn.Module) -> None:
    """Check that all ranks have the same gradients, so that they take the same optimizer step.

    Every rank passes its model, between backward() and optimizer.step(). With gradient
    accumulation, check the last step of an epoch above all: its window may be shorter.
    """
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    if not any(_gather(len(gradients))):
        _fail("no rank has a gradient", "call this between backward() and optimizer.step()")
    way_out = (
        "the last forward before a step must be model(x), not model.module(x), outside no_sync"
    )
    _require_equal("gradient", gradients, way_out)


def _fail(seen: str, way_out: str) -> NoReturn:
    raise AssertionError(f"{seen}: {way_out}")


def _gather(value: Any) -> list[Any]:
    """Return the values of all ranks, in rank order."""
    if not (dist.is_available() and dist.is_initialized()):
        return [value]
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def _plain(values: Iterable) -> list[Any]:
    """Return a list with a number in place of each tensor: equal tensors have different hashes."""
    return [value.item() if isinstance(value, Tensor) else value for value in values]


def _require_equal(what: str, tensors: dict[str, Tensor], way_out: str) -> None:
    """Fail unless all ranks have the same tensors, bit for bit (so NaN equals NaN)."""
    layouts = _gather([(name, tuple(t.shape), t.dtype) for name, t in tensors.items()])
    if any(layout != layouts[0] for layout in layouts):
        numbers = sorted({len(layout) for layout in layouts})
        _fail(f"ranks have {numbers} {what}s, with different names, shapes or dtypes", way_out)
    different = []
    for name, tensor in tensors.items():
        own = tensor.detach().to_dense().contiguous().flatten().view(torch.uint8)
        rank_0 = own.clone()
        if len(layouts) > 1:
            dist.broadcast(rank_0, src=0)
        if not torch.equal(own, rank_0):
            different.append(name)
    for rank, names in enumerate(_gather(different)):
        if names:
            seen = f"{len(names)} of {len(tensors)} {what}s differ between rank 0 and rank {rank}"
            _fail(f"{seen}, such as {names[0]}", way_out)
