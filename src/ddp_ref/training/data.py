"""Which samples each rank sees, in which order, and the loaders for them."""

import ctypes
import multiprocessing
import multiprocessing.util
import os
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    Sampler,
    Subset,
    TensorDataset,
    default_collate,
)

from ..randomness import borrowed_generators, seed_from, seed_host

PR_SET_PDEATHSIG = 1  # linux/prctl.h
PATIENCE = 2.0  # seconds that a rank waits for its workers when it exits


class ShardSampler(Sampler[int]):
    """Give a rank every world_size-th of `size` items: each item goes to exactly one rank."""

    def __init__(self, size: int, *, rank: int, world_size: int) -> None:
        self._indices = range(rank, size, world_size)

    def __iter__(self) -> Iterator[int]:
        return iter(self._indices)

    def __len__(self) -> int:
        return len(self._indices)


class TrainSampler(Sampler[tuple[int, int]]):
    """Give a rank its (epoch, index) pairs, starting anywhere in any epoch.

    Order and padding are those of torch's DistributedSampler for the same seed and epoch: up to
    world_size - 1 items are repeated, so that all ranks take the same number of steps.
    `samples_seen` counts the samples of the epoch that all ranks together have seen. They are
    always a prefix of one permutation, so the number means the same at every world size.
    """

    def __init__(
        self, size: int, *, rank: int, world_size: int, shuffle: bool = True, seed: int = 0
    ) -> None:
        if size < 1:
            raise ValueError("the training set is empty: it must have at least 1 sample")
        self.size, self.rank, self.world_size = size, rank, world_size
        self.shuffle, self.seed = shuffle, seed
        self.start(epoch=0)

    def start(self, epoch: int, samples_seen: int = 0) -> None:
        """Make the next iteration start after `samples_seen` samples of `epoch`."""
        self.epoch, self.samples_seen = epoch, samples_seen

    @property
    def repeated(self) -> int:
        """How many items are repeated in a whole epoch, as padding."""
        return -self.size % self.world_size

    def __iter__(self) -> Iterator[tuple[int, int]]:
        order = self._order()
        left = order[self.samples_seen :]
        padding = -len(left) % self.world_size
        left += (order * -(-padding // self.size))[:padding]
        return ((self.epoch, index) for index in left[self.rank :: self.world_size])

    def __len__(self) -> int:
        return -(-max(0, self.size - self.samples_seen) // self.world_size)

    def _order(self) -> list[int]:
        if not self.shuffle:
            return list(range(self.size))
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        return torch.randperm(self.size, generator=generator).tolist()


class SeededDataset(Dataset[Any]):
    """Look up (epoch, index) in `dataset`, with random numbers that depend on (seed, epoch, index).

    The global generators of torch, random and numpy are seeded for each sample and restored after
    the batch, so an augmentation is the same in any process and at any world size. It costs about
    10 microseconds per sample. Batches are collated here: `collate_fn` draws from the generators
    as the last sample left them.
    """

    def __init__(
        self, dataset: Dataset[Any], seed: int, collate_fn: Callable[[list[Any]], Any]
    ) -> None:
        self.dataset, self.seed, self.collate_fn = dataset, seed, collate_fn

    def __len__(self) -> int:
        return len(self.dataset)  # type: ignore[arg-type]  # train_loader checked that it has a length

    def __getitems__(self, keys: Sequence[tuple[int, int]]) -> Any:
        with borrowed_generators():
            return self.collate_fn([self._sample(epoch, index) for epoch, index in keys])

    def _sample(self, epoch: int, index: int) -> Any:
        seed_host(self.seed, epoch, index)
        return self.dataset[index]


class Rows(Dataset[Any]):
    """Look up (epoch, index) in a `TensorDataset`, or in a Subset of one, a whole batch at once.

    Looking rows up one by one costs several times as much. The batch is what default_collate would
    return: for each tensor of the data set its rows, of shape (keys, ...). Rows draw no random
    numbers, so only a `collate_fn` needs a seed; it gets the list of items.
    """

    def __init__(
        self, dataset: Dataset[Any], seed: int, collate_fn: Callable[[list[Any]], Any] | None
    ) -> None:
        self.dataset, self.seed, self.collate_fn = dataset, seed, collate_fn

    def __len__(self) -> int:
        return len(self.dataset)  # type: ignore[arg-type]

    def __getitems__(self, keys: Sequence[tuple[int, int]]) -> Any:
        batch = self._rows(keys)
        if self.collate_fn is None:
            return batch
        with borrowed_generators():
            seed_host(self.seed, *keys[-1])
            return self.collate_fn(list(zip(*batch, strict=True)))

    def _rows(self, keys: Sequence[tuple[int, int]]) -> list[Tensor]:
        dataset: Any = self.dataset
        rows = [index for _, index in keys]
        while isinstance(dataset, Subset):
            rows = [int(dataset.indices[row]) for row in rows]
            dataset = dataset.dataset
        index = torch.tensor(rows)
        # Indexing may keep the memory layout of a permuted tensor; stacking rows would not.
        return [tensor[index].contiguous() for tensor in dataset.tensors]


def _has_rows(dataset: Dataset[Any]) -> bool:
    """Say whether `Rows` works for `dataset`; a subclass may look items up in its own way."""
    while type(dataset) is Subset:
        dataset = dataset.dataset
    return type(dataset) is TensorDataset and all(map(_is_plain, dataset.tensors))


def _is_plain(tensor: Tensor) -> bool:
    """Say whether indexing many rows of `tensor` gives the same as stacking them one by one."""
    if type(tensor) is not Tensor or tensor.layout is not torch.strided or tensor.is_nested:
        return False
    first = tensor[:1]
    try:
        first[torch.zeros(len(first), dtype=torch.long)]
    except NotImplementedError:  # some dtypes, such as uint16 in torch 2.8
        return False
    return True


def _as_it_is(batch: Any) -> Any:
    """Return `batch`, which is collated already."""
    return batch


class BaseSeeds(torch.Generator):
    """A generator for the seeds of a loader's workers, seeded from (seed, epoch, rank).

    It is for samplers of the user's own, whose samples do not pass through SeededDataset.
    """

    root = 0

    def start(self, epoch: int, rank: int) -> None:
        """Seed the generator for an epoch."""
        self.manual_seed(seed_from(self.root, epoch, rank))


def train_loader(
    dataset: Dataset[Any],
    batch_size: int,
    *,
    rank: int,
    world_size: int,
    shuffle: bool | None = None,
    seed: int = 0,
    **loader: Any,
) -> DataLoader[Any]:
    """Return a DataLoader for this rank's training batches.

    It has a TrainSampler and seeds each sample (see SeededDataset and Rows). A `sampler` or
    `batch_sampler` of the caller is used as it is, if there is one rank, or if the sampler's
    attributes `rank` and `num_replicas` show that it gives this rank its own samples, as
    DistributedSampler's do. An IterableDataset is used as it is, on one rank only.

    Args:
        dataset: The training set, the same on all ranks.
        batch_size: Samples per rank and batch.
        rank: This rank.
        world_size: The number of ranks.
        shuffle: Whether to shuffle each epoch; None means yes.
        seed: The seed of the order and of the samples' random numbers.
        **loader: Anything else that DataLoader takes.

    Raises:
        ValueError: If the data set or the sampler cannot be used as described.
    """
    own = next((n for n in ("sampler", "batch_sampler") if loader.get(n) is not None), None)
    if isinstance(dataset, IterableDataset):
        _check_iterable(world_size)
    elif own:
        _check_sampler(own, loader[own], rank, world_size)
    else:
        check_count("batch_size", batch_size)
        sampler = TrainSampler(
            length_of(dataset),
            rank=rank,
            world_size=world_size,
            shuffle=shuffle is not False,
            seed=seed,
        )
        loader["sampler"], shuffle = sampler, None
        collate_fn = loader.get("collate_fn")
        if _has_rows(dataset):
            dataset = Rows(dataset, seed, collate_fn)
        else:
            dataset = SeededDataset(dataset, seed, collate_fn or default_collate)
        loader["collate_fn"] = _as_it_is
    if loader.get("batch_sampler") is None:
        loader["batch_size"] = batch_size
    if not isinstance(dataset, Rows | SeededDataset) and "generator" not in loader:
        loader["generator"] = BaseSeeds()
        loader["generator"].root = seed
    return _loader(dataset, shuffle=shuffle, **loader)


def shard_loader(
    dataset: Dataset[Any], batch_size: int, *, rank: int, world_size: int, **loader: Any
) -> DataLoader[Any]:
    """Return a DataLoader for this rank's shard of `dataset`, without padding.

    Evaluation is exact with it: each item is on one rank. A rank may have no item at all.

    Args:
        dataset: The data, the same on all ranks.
        batch_size: Samples per rank and batch.
        rank: This rank.
        world_size: The number of ranks.
        **loader: Anything else that DataLoader takes and that leaves the items and their order.

    Raises:
        ValueError: If the data set has no length, or an option would change the items or the order.
    """
    changing = {"shuffle", "sampler", "batch_sampler", "drop_last"} & {
        k for k in loader if loader[k]
    }
    if changing:
        raise ValueError(
            f"evaluation uses each item once and in order: leave out {', '.join(sorted(changing))}"
        )
    if isinstance(dataset, IterableDataset):
        raise ValueError(
            "evaluation needs a data set with a length, and an IterableDataset has none: "
            "make a list of its items"
        )
    check_count("batch_size", batch_size)
    sampler = ShardSampler(length_of(dataset), rank=rank, world_size=world_size)
    return _loader(dataset, batch_size=batch_size, **loader | {"sampler": sampler})


def _loader(dataset: Dataset[Any], **options: Any) -> DataLoader[Any]:
    """Return a DataLoader that does not draw from the global generator, with our worker start."""
    if options.get("num_workers"):
        options["worker_init_fn"] = partial(
            _start_worker,
            options.get("worker_init_fn"),
            _workers_of(os.getpid()).rank_ends,
            threading.current_thread() is threading.main_thread(),
        )
    options.setdefault("generator", torch.Generator())  # for the workers' base seeds
    return Loader(dataset, **options)


class Loader(DataLoader[Any]):
    """A DataLoader whose workers exit with their rank."""

    def __iter__(self) -> Any:
        batches = super().__iter__()
        if self.num_workers:
            _workers_of(os.getpid()).left.update(getattr(batches, "_workers", ()))
        return batches


class Workers:
    """The worker processes of a rank: they ignore signals meant for it, and exit when it does."""

    def __init__(self) -> None:
        self.rank_ends = multiprocessing.RawValue("b", 0)
        self.left: weakref.WeakSet[multiprocessing.process.BaseProcess] = weakref.WeakSet()
        multiprocessing.util.Finalize(None, self.end, exitpriority=0)

    def end(self) -> None:
        """End the remaining workers.

        multiprocessing would join them without a timeout, and a worker blocked in C never sees
        SIGTERM.
        """
        self.rank_ends.value = 1
        left = [worker for worker in self.left if worker.is_alive()]
        if left:
            signal.signal(
                signal.SIGCHLD, signal.SIG_DFL
            )  # torch's handler raises if a worker is killed
        for worker in left:
            worker.terminate()
        deadline = time.monotonic() + PATIENCE
        for worker in left:
            worker.join(max(0, deadline - time.monotonic()))
            worker.kill()


@cache
def _workers_of(pid: int) -> Workers:
    """Return the workers of this process, whose id is `pid`: a forked process has its own."""
    return Workers()


def _start_worker(
    then: Callable[[int], None] | None, rank_ends: Any, from_main: bool, worker_id: int
) -> None:
    """Ignore SIGTERM and SIGUSR1, which are for the rank, exit with it, then call `then`."""

    def terminate(number: int, frame: Any) -> None:
        if rank_ends.value:
            os._exit(0)

    signal.signal(signal.SIGTERM, terminate)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    # A forked worker keeps the rank's sockets open, so until it exits, no peer notices that the
    # rank died. torch checks for the parent only every 5 seconds. The signal comes when the thread
    # that forked the worker ends, so it is right only if that was the main thread.
    if sys.platform == "linux" and from_main:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if then:
        then(worker_id)


def length_of(dataset: Dataset[Any]) -> int:
    """Return the length of `dataset`, or raise ValueError if it has none."""
    try:
        return len(dataset)  # type: ignore[arg-type]
    except TypeError:
        kind = type(dataset).__name__
        raise ValueError(f"the data set must have a length: add __len__ to {kind}") from None


def check_count(name: str, value: object) -> None:
    """Raise ValueError unless `value` is an integer of at least 1."""
    if type(value) is not int or value < 1:
        raise ValueError(f"{name} must be an integer of at least 1, not {value!r}")


def _check_iterable(world_size: int) -> None:
    if world_size > 1:
        raise ValueError(
            f"an IterableDataset cannot be used on {world_size} ranks, which could take different "
            "numbers of steps: use a data set with __len__ and __getitem__"
        )


def _check_sampler(name: str, sampler: Any, rank: int, world_size: int) -> None:
    """Raise ValueError unless `sampler` gives this rank its own samples."""
    inner = getattr(sampler, "sampler", sampler)  # the one inside a BatchSampler
    shard = getattr(inner, "rank", None), getattr(inner, "num_replicas", None)
    if world_size > 1 and shard != (rank, world_size):
        raise ValueError(
            f"the {name} must be for rank {rank} of {world_size}, but its (rank, num_replicas) is "
            f"{shard}: use a DistributedSampler, or leave out the {name}"
        )
