"""The loaders that give each rank its batches, for `Handler` and for training loops of your own."""

import threading
from collections.abc import Generator, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice, repeat
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, Sampler
from torch.utils.data.dataloader import default_collate
from torch.utils.data.dataset import ChainDataset, ConcatDataset, Subset, TensorDataset
from torch.utils.data.sampler import RandomSampler, SequentialSampler

from .initialize import dist_info
from .randomness import seed_from
from .settings import check_count
from .signals import kill_at_exit, start_worker

# The options that a rebuilt loader keeps. DataLoader takes the second list only with workers.
KEPT = ("batch_size", "num_workers", "collate_fn", "pin_memory", "drop_last", "worker_init_fn")
KEPT_OF_WORKERS = ("timeout", "multiprocessing_context", "prefetch_factor", "persistent_workers")
NO_INDEXING = (torch.uint16, torch.uint32, torch.uint64)  # torch 2.8 cannot look up their rows


class TrainSampler(Sampler[int]):
    """Give a rank its samples, starting anywhere in any epoch.

    Order and padding are those of torch's DistributedSampler for the same seed and epoch: up to
    num_replicas - 1 items are repeated, so that all ranks take the same number of steps.
    `samples_seen` counts the samples of the epoch that all ranks together have seen. They are
    always a prefix of one permutation, so the number means the same at every world size.
    """

    def __init__(
        self, size: int, *, rank: int, world_size: int, shuffle: bool = True, seed: int = 0
    ) -> None:
        if size < 1:
            raise ValueError("the training set is empty: it must have at least 1 sample")
        self.size, self.rank, self.num_replicas = size, rank, world_size
        self.shuffle, self.seed = shuffle, seed
        self.set_epoch(0)

    def set_epoch(self, epoch: int, samples_seen: int = 0) -> None:
        """Make the next iteration start after `samples_seen` samples of `epoch`."""
        self.epoch, self.samples_seen = epoch, samples_seen

    def __iter__(self) -> Iterator[int]:
        order = torch.arange(self.size)
        if self.shuffle:
            generator = torch.Generator().manual_seed(self.seed + self.epoch)
            order = torch.randperm(self.size, generator=generator)
        left = order[self.samples_seen :]
        padding = -len(left) % self.num_replicas
        left = torch.cat([left, order.repeat(-(-padding // self.size))[:padding]])
        return iter(left[self.rank :: self.num_replicas].tolist())

    def __len__(self) -> int:
        return -(-max(0, self.size - self.samples_seen) // self.num_replicas)


class Loader(DataLoader[Any]):
    """A DataLoader that does not use the global random generator; `seed` seeds its workers.

    Without workers, it looks up the rows of a TensorDataset a batch at once, which is several times
    as fast.
    """

    def __init__(self, dataset: Any, seed: int, **options: Any) -> None:
        self.has_own_generator = options.get("generator") is not None
        if not self.has_own_generator:
            options["generator"] = torch.Generator().manual_seed(seed)
        super().__init__(dataset, **options)

    def set_seed(self, *parts: int) -> None:
        """Seed the workers of the next iteration, unless the generator is the user's own."""
        if not self.has_own_generator:
            self.generator.manual_seed(seed_from(*parts))

    def __iter__(self) -> Any:
        data: Any = self.dataset
        plain = getattr(type(data), "__getitem__", None) is TensorDataset.__getitem__
        plain = plain and not hasattr(data, "__getitems__")  # which torch calls first
        if not plain or self.num_workers or self.collate_fn is not default_collate:
            return super().__iter__()
        whole = self.batch_sampler and all(t.dtype not in NO_INDEXING for t in data.tensors)
        return self._look_up(data.tensors) if whole else super().__iter__()

    def _look_up(self, tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
        """Yield what default_collate makes of the rows of each batch."""
        pin = self.pin_memory and torch.cuda.is_available()
        for batch in self.batch_sampler or ():
            rows = torch.tensor(batch)
            # Indexing may keep the memory layout of a permuted tensor; stacking rows would not.
            parts = [tensor[rows].contiguous() for tensor in tensors]
            yield [part.pin_memory() for part in parts] if pin else parts

    def _get_iterator(self) -> Any:
        user_init_fn = self.worker_init_fn
        from_main = threading.current_thread() is threading.main_thread()
        self.worker_init_fn = partial(start_worker, user_init_fn, from_main)  # of those that start
        batches: Any = super()._get_iterator()
        self.worker_init_fn = user_init_fn
        if self.num_workers:
            kill_at_exit(batches._workers)
        return batches


def train_loader(
    data: Dataset[Any] | DataLoader[Any],
    batch_size: int | None = None,
    *,
    rank: int | None = None,
    world_size: int | None = None,
    shuffle: bool | None = None,
    seed: int = 0,
    **loader: Any,
) -> DataLoader[Any]:
    """Return a DataLoader for this rank's training batches; call its `sampler.set_epoch(epoch)`.

    A `sampler` or `batch_sampler` of yours is used as it is, if there is one rank, or if its
    attributes `rank` and `num_replicas` show that it gives this rank its own samples, as those of
    DistributedSampler do. An IterableDataset is used as it is: shard it by rank and worker.

    Args:
        data: A data set, the same on all ranks, or an existing DataLoader. An existing loader is
            rebuilt with its collate_fn, workers, pinning and drop_last, and with a sampler that
            gives this rank its own samples.
        batch_size: Samples per rank and batch. Default: the existing loader's.
        rank: This rank. Default: its rank in the open group, or 0.
        world_size: The number of ranks. Default: that of the open group, or 1.
        shuffle: Whether to shuffle each epoch. Default: yes, or as the existing loader does.
        seed: The seed of the order, and, together with the rank, of the workers.
        **loader: Anything else that DataLoader takes.

    Raises:
        ValueError: If the data or the sampler cannot be used as described.
    """
    rank, world_size = _rank_and_world_size(rank, world_size)
    dataset, options = _unpack(data, batch_size, {"shuffle": shuffle} | loader)
    own = next((n for n in ("batch_sampler", "sampler") if options.get(n) is not None), None)
    if own:
        _check_sampler(own, options[own], rank, world_size)
        options["shuffle"] = shuffle  # True is an error of DataLoader
    elif not isinstance(dataset, IterableDataset):
        size = length_of(dataset)
        check_count("batch_size", options.get("batch_size"))
        in_random_order = options.pop("shuffle") is not False
        shard = {"rank": rank, "world_size": world_size, "seed": seed}
        options["sampler"] = TrainSampler(size, shuffle=in_random_order, **shard)
    if options.get("persistent_workers") and (learning := learners(dataset)):
        raise ValueError(
            f"{type(learning[0]).__name__}.set_epoch would not reach the copies of the data set in "
            "persistent workers: leave out persistent_workers"
        )
    return Loader(dataset, seed_from(seed, rank), **options)


def eval_loader(
    data: Dataset[Any] | DataLoader[Any],
    batch_size: int | None = None,
    *,
    rank: int | None = None,
    world_size: int | None = None,
    **loader: Any,
) -> DataLoader[Any]:
    """Return a DataLoader for this rank's shard of `data`, in order and without padding.

    Evaluation is exact with it: each item is on one rank. A rank may have no item at all.

    Args:
        data: A data set, the same on all ranks, or an existing DataLoader of one, which is rebuilt
            with its collate_fn, workers and pinning.
        batch_size: Samples per rank and batch. Default: the existing loader's.
        rank: This rank. Default: its rank in the open group, or 0.
        world_size: The number of ranks. Default: that of the open group, or 1.
        **loader: Any other DataLoader option that changes neither the items nor their order.

    Raises:
        ValueError: If the data has no length, or an option would change the items or the order.
    """
    rank, world_size = _rank_and_world_size(rank, world_size)
    if given := [n for n in ("shuffle", "sampler", "batch_sampler", "drop_last") if loader.get(n)]:
        raise ValueError(f"evaluation uses all items in order: leave out {', '.join(given)}")
    dataset, options = _unpack(data, batch_size, loader)
    if isinstance(dataset, IterableDataset):
        raise ValueError("an IterableDataset cannot be evaluated exactly: make a list of its items")
    own = options.pop("batch_sampler", None) or options.get("sampler")
    ours = isinstance(data, Loader) and type(own) is range  # from a loader of this function
    if not ours and type(own) not in (type(None), DistributedSampler):
        raise ValueError(
            f"evaluation uses each item once, but a {type(own).__name__} may not: pass only the "
            "data set, or a Subset of it, and batch_size"
        )
    shard = range(rank, length_of(dataset), world_size)
    check_count("batch_size", options.get("batch_size"))
    in_order = {"shuffle": None, "drop_last": False, "sampler": shard}
    return Loader(dataset, seed_from(rank), **options | in_order)


def endless(loader: DataLoader[Any]) -> Generator[Any, None, None]:
    """Yield the batches of a stream, again from the beginning when it ends."""
    while True:
        batch = None
        for batch in loader:
            yield batch
        if batch is None:
            raise ValueError("this rank's stream gave no batch: check how it shards, and drop_last")


def in_steps(batches: Iterator[Any], number: int, size: int) -> Iterator[list[Any]]:
    """Yield lists of `size` batches, `number` in all; raise RuntimeError if there are fewer."""
    for first in range(0, number, size):
        wanted = min(size, number - first)
        if len(found := list(islice(batches, wanted))) < wanted:
            raise RuntimeError(
                f"this rank's loader ended after {first + len(found)} of {number} batches, and "
                "other ranks wait for the rest: its sampler gives fewer than its __len__ says"
            )
        yield found
    if next(batches, None) is not None:
        raise RuntimeError(
            f"this rank's loader goes on after {number} batches: its sampler gives more than its "
            "__len__ says"
        )


def items_of_batches(loader: Any) -> Iterator[int | None]:
    """Yield the number of items in each batch; None if it is not known."""
    size = (loader.batch_size or 0) if isinstance(loader, DataLoader) else 0
    left = (size and length_or_none(loader.sampler)) or 0
    while left > 0:
        yield min(left, size)
        left -= size
    yield from repeat(None)


def length_of(dataset: Any) -> int:
    """Return the length of `dataset`, or raise ValueError if it has none."""
    first = dataset[0] if type(dataset) in (list, tuple) and dataset else None
    if isinstance(dataset, Mapping) or isinstance(first, Dataset | DataLoader):
        parts = ", ".join(map(str, dataset)) if first is None else type(first).__name__
        raise ValueError(
            f"the data must be one data set, not a {type(dataset).__name__} of {parts}: pass "
            "one here, and call evaluate or predict for the others in a Callback"
        )
    if (length := length_or_none(dataset)) is None:
        raise ValueError(f"a data set must have a length: add __len__ to {type(dataset).__name__}")
    return length


def length_or_none(data: Any) -> int | None:
    """Return the length of a data set or a loader; None if it has none, as a stream's loader."""
    try:
        return None if isinstance(getattr(data, "dataset", None), IterableDataset) else len(data)
    except TypeError:
        return None


def samples_per_batch(loader: DataLoader[Any]) -> int:
    """Return a loader's batch size; a batch sampler without one counts each batch as a sample."""
    return loader.batch_size or getattr(loader.batch_sampler, "batch_size", None) or 1


def seek(loader: Any, epoch: int, samples_seen: int) -> None:
    """Tell the data set and the samplers the epoch, and a TrainSampler where to start."""
    dataset, own, outer = loader.dataset, loader.sampler, loader.batch_sampler
    size = length_or_none(dataset)
    for part in (*learners(dataset), own, outer, getattr(outer, "sampler", None)):
        if callable(set_epoch := getattr(part, "set_epoch", None)):
            set_epoch(epoch)
    if (now := length_or_none(dataset)) != size:
        raise ValueError(
            f"set_epoch has changed the length of the data set from {size} to {now}: call it in "
            "on_epoch_start, and then set_train_loader"
        )
    if isinstance(own, TrainSampler):
        own.set_epoch(epoch, samples_seen)


def learners(dataset: Any) -> list[Any]:
    """Return what has a `set_epoch`: the data set, or those in its Subset or ConcatDataset."""
    if hasattr(dataset, "set_epoch"):
        return [dataset]
    inner = [dataset.dataset] if isinstance(dataset, Subset) else []
    if isinstance(dataset, ConcatDataset | ChainDataset):
        inner = list(dataset.datasets)
    return list({id(each): each for part in inner for each in learners(part)}.values())


def _rank_and_world_size(rank: int | None, world_size: int | None) -> tuple[int, int]:
    info = dist_info()
    return info.rank if rank is None else rank, world_size or info.world_size


def _unpack(data: Any, batch_size: int | None, given: Any) -> tuple[Any, dict[str, Any]]:
    """Return the data set and the loader's options: an existing loader's, unless `given`."""
    if given.get("in_order") is False:
        raise ValueError("in_order=False would mix up the order of the samples: leave it out")
    options: dict[str, Any] = {}
    if isinstance(data, DataLoader):
        kind = type(data)
        usual = kind._get_iterator in (DataLoader._get_iterator, Loader._get_iterator)
        if not usual or kind.__iter__ not in (DataLoader.__iter__, Loader.__iter__):
            raise ValueError(  # PyG's NeighborLoader, for one
                f"{kind.__name__} makes its batches in its own __iter__ or _get_iterator, so it "
                "cannot be sharded: pass its data set, or an IterableDataset that yields batches"
            )
        kept = KEPT + (KEPT_OF_WORKERS if given.get("num_workers", data.num_workers) else ())
        options = {name: getattr(data, name) for name in kept}
        if data.batch_size is None and data.batch_sampler is not None:
            options["batch_sampler"] = data.batch_sampler
        elif (shuffles := _shuffles(data.sampler, data.dataset)) is not None:
            options["shuffle"] = shuffles
        elif not isinstance(data.dataset, IterableDataset):
            options["sampler"] = data.sampler
        data = data.dataset
    options |= {name: value for name, value in given.items() if value is not None}
    if batch_size is not None:
        options["batch_size"] = batch_size
    elif options.get("batch_sampler") is not None:
        options.pop("batch_size", None)  # DataLoader refuses both together
    return data, {"shuffle": None} | options


def _shuffles(sampler: Any, dataset: Any) -> bool | None:
    """Say whether `sampler` shuffles; None if it may not give all items, each once."""
    if isinstance(sampler, TrainSampler):
        return sampler.shuffle if sampler.size == len(dataset) else None
    if type(sampler) is RandomSampler and not sampler.replacement:
        return True if sampler.num_samples == len(dataset) else None
    return False if type(sampler) is SequentialSampler and len(sampler) == len(dataset) else None


def _check_sampler(name: str, sampler: Any, rank: int, world_size: int) -> None:
    """Raise ValueError unless `sampler` gives this rank its own samples."""
    # Check the sampler inside a BatchSampler, unless the outer one is rank-aware itself.
    inner = sampler if hasattr(sampler, "num_replicas") else getattr(sampler, "sampler", sampler)
    shard = getattr(inner, "rank", None), getattr(inner, "num_replicas", None)
    if world_size > 1 and shard != (rank, world_size):
        raise ValueError(
            f"the {name} must be for rank {rank} of {world_size}, but the (rank, num_replicas) of "
            f"this {type(inner).__name__} is {shard}: use a DistributedSampler (inside a "
            "BatchSampler, too), or pass only the data set, or a Subset of it, and batch_size"
        )
