"""Which samples each rank sees, in which order, and the loaders that feed them."""

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

from .randomness import borrowed_generators, seed_from, seed_host

PR_SET_PDEATHSIG = 1  # linux/prctl.h
PATIENCE = 2.0  # seconds for workers to end, once their rank does


class ShardSampler(Sampler[int]):
    """Give a rank every world_size-th of `size` items: each item goes to one rank, none twice."""

    def __init__(self, size: int, *, rank: int, world_size: int) -> None:
        self._indices = range(rank, size, world_size)

    def __iter__(self) -> Iterator[int]:
        return iter(self._indices)

    def __len__(self) -> int:
        return len(self._indices)


class TrainSampler(Sampler[tuple[int, int]]):
    """Give a rank its (epoch, index) pairs, from any position of any epoch on.

    The order is that of torch's DistributedSampler for the same seed and epoch, and so is the
    padding: up to world_size - 1 items are repeated, so that all ranks take as many steps.
    A position counts the samples that all ranks together have seen of the epoch; it is the same
    at every world size, as these are always the first of one permutation.
    """

    def __init__(
        self, size: int, *, rank: int, world_size: int, shuffle: bool = True, seed: int = 0
    ) -> None:
        if size < 1:
            raise ValueError("the training set is empty: it must have at least 1 sample")
        self.size, self.rank, self.world_size = size, rank, world_size
        self.shuffle, self.seed = shuffle, seed
        self.start(epoch=0)

    def start(self, epoch: int, position: int = 0) -> None:
        """Set where the next iteration begins: at `position` samples of `epoch`."""
        self.epoch, self.position = epoch, position

    @property
    def repeated(self) -> int:
        """How many items come twice in a whole epoch."""
        return -self.size % self.world_size

    def __iter__(self) -> Iterator[tuple[int, int]]:
        order = self._order()
        left = order[self.position :]
        padding = -len(left) % self.world_size
        left += (order * -(-padding // self.size))[:padding]
        return ((self.epoch, index) for index in left[self.rank :: self.world_size])

    def __len__(self) -> int:
        return -(-max(0, self.size - self.position) // self.world_size)

    def _order(self) -> list[int]:
        if not self.shuffle:
            return list(range(self.size))
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        return torch.randperm(self.size, generator=generator).tolist()


class SeededDataset(Dataset[Any]):
    """Look up (epoch, index) in `dataset`, with random numbers that depend on (seed, epoch, index).

    torch's, random's and numpy's global generators are seeded for each sample and restored after
    the batch: an augmentation is the same in any process, and at any world size. It costs about
    10 microseconds a sample. A batch comes collated: `collate_fn` goes on with the numbers of its
    last sample.
    """

    def __init__(
        self, dataset: Dataset[Any], seed: int, collate_fn: Callable[[list[Any]], Any]
    ) -> None:
        self.dataset, self.seed, self.collate_fn = dataset, seed, collate_fn

    def __len__(self) -> int:
        return len(self.dataset)  # type: ignore[arg-type]  # sized: train_loader has looked

    def __getitems__(self, keys: Sequence[tuple[int, int]]) -> Any:
        with borrowed_generators():
            return self.collate_fn([self._sample(epoch, index) for epoch, index in keys])

    def _sample(self, epoch: int, index: int) -> Any:
        seed_host(self.seed, epoch, index)
        return self.dataset[index]


class Rows(Dataset[Any]):
    """Look up (epoch, index) in a `TensorDataset`, or in a Subset of one, a whole batch at once.

    The batch comes collated, as default_collate does it: of each of the data set's tensors the
    rows, (keys, ...). One by one they cost several times as much. No row draws a random number, so
    nothing is seeded but for a `collate_fn`, which is given the items.
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
        # An index may keep the layout of a permuted tensor, which rows that are stacked lose.
        return [tensor[index].contiguous() for tensor in dataset.tensors]


def _has_rows(dataset: Dataset[Any]) -> bool:
    """Say whether `Rows` can look `dataset` up; a subclass may do so in its own way."""
    while type(dataset) is Subset:
        dataset = dataset.dataset
    return type(dataset) is TensorDataset and all(map(_is_plain, dataset.tensors))


def _is_plain(tensor: Tensor) -> bool:
    """Say whether rows of `tensor`, looked up at once, are what stacking them one by one gives."""
    if type(tensor) is not Tensor or tensor.layout is not torch.strided or tensor.is_nested:
        return False
    first = tensor[:1]
    try:
        first[torch.zeros(len(first), dtype=torch.long)]
    except NotImplementedError:  # of some dtypes, such as uint16 in torch 2.8
        return False
    return True


def _as_it_is(batch: Any) -> Any:
    """Return a batch that comes collated."""
    return batch


class BaseSeeds(torch.Generator):
    """Where the seeds of a loader's workers come from: others for each (seed, epoch, rank).

    For samplers of the user's own, whose samples are not drawn through SeededDataset.
    """

    root = 0

    def start(self, epoch: int, rank: int) -> None:
        """Begin an epoch."""
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
    """Return the loader of this rank's training batches, of `batch_size` samples each.

    Its `sampler` is a TrainSampler, its batches are drawn through SeededDataset, or through Rows
    where that can be; `shuffle` None is True. A `sampler` or `batch_sampler` of the caller is used
    as it is where it says whose samples it gives, by the attributes `rank` and `num_replicas` of a
    DistributedSampler, or where there is but one rank; so is an IterableDataset on one rank.
    Raises ValueError otherwise.
    `loader` takes what DataLoader takes.
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
    """Return the loader of this rank's part of `dataset`, without padding: for exact evaluation.

    A rank may have no sample at all. Raises ValueError for an IterableDataset, a sampler of the
    caller's, or an option that would change order or number.
    """
    changing = {"shuffle", "sampler", "batch_sampler", "drop_last"} & {
        k for k in loader if loader[k]
    }
    if changing:
        raise ValueError(
            f"evaluation takes each item once and in order: leave out {', '.join(sorted(changing))}"
        )
    if isinstance(dataset, IterableDataset):
        raise ValueError(
            "evaluation needs a data set with a length, to give each item to one rank: "
            "an IterableDataset has none, make a list of its items"
        )
    check_count("batch_size", batch_size)
    sampler = ShardSampler(length_of(dataset), rank=rank, world_size=world_size)
    return _loader(dataset, batch_size=batch_size, **loader | {"sampler": sampler})


def _loader(dataset: Dataset[Any], **options: Any) -> DataLoader[Any]:
    """Return a DataLoader that draws nothing from the global generator, with workers of ours."""
    if options.get("num_workers"):
        options["worker_init_fn"] = partial(
            _start_worker,
            options.get("worker_init_fn"),
            _workers_of(os.getpid()).rank_ends,
            threading.current_thread() is threading.main_thread(),
        )
    options.setdefault("generator", torch.Generator())  # of the workers' base seeds
    return Loader(dataset, **options)


class Loader(DataLoader[Any]):
    """A DataLoader whose workers end with their rank."""

    def __iter__(self) -> Any:
        batches = super().__iter__()
        if self.num_workers:
            _workers_of(os.getpid()).left.update(getattr(batches, "_workers", ()))
        return batches


class Workers:
    """The worker processes of a rank: they leave signals to it, and end when it does."""

    def __init__(self) -> None:
        self.rank_ends = multiprocessing.RawValue("b", 0)
        self.left: weakref.WeakSet[multiprocessing.process.BaseProcess] = weakref.WeakSet()
        multiprocessing.util.Finalize(None, self.end, exitpriority=0)

    def end(self) -> None:
        """End those that are left: multiprocessing would wait for a deaf one for ever.

        Such is a worker within a call of C, which runs no handler of Python's.
        """
        self.rank_ends.value = 1
        left = [worker for worker in self.left if worker.is_alive()]
        if left:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's raises where a worker is killed
        for worker in left:
            worker.terminate()
        deadline = time.monotonic() + PATIENCE
        for worker in left:
            worker.join(max(0, deadline - time.monotonic()))
            worker.kill()


@cache
def _workers_of(pid: int) -> Workers:
    """Return the workers of this process, `pid`: a fork has its own."""
    return Workers()


def _start_worker(
    then: Callable[[int], None] | None, rank_ends: Any, from_main: bool, worker_id: int
) -> None:
    """Leave SIGTERM and SIGUSR1 to the rank, end when it ends, and do what the caller wants."""

    def terminate(number: int, frame: Any) -> None:
        if rank_ends.value:
            os._exit(0)

    signal.signal(signal.SIGTERM, terminate)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    # A forked worker holds the rank's sockets: as long as it lives the peers see no death. torch
    # looks for the parent every 5 seconds only. It is the thread's death that is told: of another
    # than the main thread, the rank would live on.
    if sys.platform == "linux" and from_main:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if then:
        then(worker_id)


def length_of(dataset: Dataset[Any]) -> int:
    """Return the length of `dataset`; ValueError where it has none."""
    try:
        return len(dataset)  # type: ignore[arg-type]
    except TypeError:
        kind = type(dataset).__name__
        raise ValueError(f"the data set must have a length: give {kind} a __len__") from None


def check_count(name: str, value: object) -> None:
    """Raise ValueError unless `value` is an integer of at least 1."""
    if type(value) is not int or value < 1:
        raise ValueError(f"{name} must be an integer of at least 1, not {value!r}")


def _check_iterable(world_size: int) -> None:
    if world_size > 1:
        raise ValueError(
            f"an IterableDataset cannot be trained on {world_size} ranks, which could take "
            "different numbers of steps: use a data set with __len__ and __getitem__"
        )


def _check_sampler(name: str, sampler: Any, rank: int, world_size: int) -> None:
    """Raise ValueError unless `sampler` gives this rank its own samples."""
    inner = getattr(sampler, "sampler", sampler)  # of a BatchSampler
    said = getattr(inner, "rank", None), getattr(inner, "num_replicas", None)
    if world_size > 1 and said != (rank, world_size):
        raise ValueError(
            f"the {name} must say that it gives rank {rank} of {world_size} its samples, by its "
            f"attributes rank and num_replicas, which are {said}: use a DistributedSampler, or "
            "leave it out"
        )
