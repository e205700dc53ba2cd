"""The loaders that give each rank its batches, for `Handler` and for training loops of your own."""

import warnings
from collections.abc import Generator, Iterator, Mapping
from itertools import islice, repeat
from typing import Any

import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset
from torch.utils.data.sampler import RandomSampler, SequentialSampler

from ..randomness import seed_from
from .loader_workers import Loader
from .rank_sync import check_same
from .samplers import SeededDataset, TrainSampler
from .settings import check_count

# The options that a rebuilt loader keeps. The second list needs num_workers above 0.
KEPT_OPTIONS = (
    "batch_size",
    "num_workers",
    "collate_fn",
    "pin_memory",
    "drop_last",
    "worker_init_fn",
)
WORKER_OPTIONS = ("timeout", "multiprocessing_context", "prefetch_factor", "persistent_workers")


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
    """Return a DataLoader for this rank's training batches.

    It has a TrainSampler, and a SeededDataset that wraps your data set and seeds each sample. A
    `worker_init_fn` finds your data set in `get_worker_info().dataset.dataset`. In your own loop,
    call `loader.sampler.set_epoch(epoch)` before each epoch.

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
        seed: The seed of the order, and of the random numbers of samples and workers.
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
        dataset = SeededDataset(dataset, seed, options.get("collate_fn"))
        options["collate_fn"] = _already_collated
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
            f"evaluation uses each item once, but a {type(own).__name__} may not: pass a Subset"
        )
    shard = range(rank, length_of(dataset), world_size)
    check_count("batch_size", options.get("batch_size"))
    in_order = {"shuffle": None, "drop_last": False, "sampler": shard}
    return Loader(dataset, seed_from(rank), **options | in_order)


class TrainBatches:
    """The batches of `loader`, one list for each optimizer step.

    Args:
        loader: This rank's loader, from `train_loader`.
        steps_per_epoch: Optimizer steps per epoch, for an IterableDataset or a batch sampler
            without a length; None to go to its end.
        accumulate: Batches per optimizer step.
        seed: The seed of the loader's workers.
        rank: This rank.
        world_size: The number of ranks.

    Raises:
        ValueError: If data without a length has no `steps_per_epoch` on several ranks, or if data
            with a length has it. If the lengths differ between ranks, all ranks raise.
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        steps_per_epoch: int | None,
        accumulate: int = 1,
        *,
        seed: int,
        rank: int,
        world_size: int,
    ) -> None:
        unsized = isinstance(loader.dataset, IterableDataset) or length_or_none(loader) is None
        if steps_per_epoch is not None:
            check_count("steps_per_epoch", steps_per_epoch)
            if not unsized:
                raise ValueError("steps_per_epoch is for data without a length: leave it out here")
        elif unsized and world_size > 1:
            raise ValueError("data without a length may differ between ranks: pass steps_per_epoch")
        self.loader, self.steps_per_epoch, self.accumulate = loader, steps_per_epoch, accumulate
        self.seed, self.rank, self.world_size = seed, rank, world_size
        self._sampler = own = loader.sampler if isinstance(loader.sampler, TrainSampler) else None
        #: what must stay the same within an epoch
        self.fingerprint = {"samples": own and own.size, "shuffle": own and own.shuffle}
        # A batch sampler without a batch_size counts each of its batches as one sample.
        batch_size = loader.batch_size or getattr(loader.batch_sampler, "batch_size", None) or 1
        #: how many samples all ranks together draw in one batch each
        self.samples_per_batch = batch_size * world_size
        self._stream = self._endless()
        self._check_lengths()

    def rewind(self) -> None:
        """Read a stream from its beginning again, and end the workers that read it so far."""
        self._stream.close()
        self._stream = self._endless()

    def seek(self, epoch: int, samples_seen: int) -> bool:
        """Make `windows` start here; return False if the epoch must start again.

        Only a TrainSampler can start in the middle of an epoch, at any world size.
        """
        if isinstance(self.loader, Loader) and not self.loader.has_own_generator:
            seed = seed_from(self.seed, epoch, self.rank)
            self.loader.generator.manual_seed(seed)  # of the workers
        dataset, outer = self.loader.dataset, self.loader.batch_sampler
        parts: list[Any] = [dataset]  # not the data set inside a SeededDataset: see there
        if self._sampler is None:
            parts += [self.loader.sampler, outer, getattr(outer, "sampler", None)]
        for part in parts:
            if callable(set_epoch := getattr(part, "set_epoch", None)):
                set_epoch(epoch)
        if self._sampler is not None:
            self._sampler.set_epoch(epoch, samples_seen)
            return True
        self._check_lengths()  # again, because a sampler's length may change with the epoch
        if samples_seen:
            why = "because only Handler's own sampler can continue in the middle of an epoch"
            warnings.warn(f"epoch {epoch + 1} starts again, {why}", stacklevel=2)
        return not samples_seen

    def windows(self) -> Iterator[list[tuple[Any, int | None]]]:
        """Yield the remaining optimizer steps of the epoch: each batch, and its number of items."""
        steps = self.steps_per_epoch
        batches = islice(self._stream, steps * self.accumulate) if steps else self.loader
        pairs = zip(batches, items_of_batches(self.loader), strict=False)
        return iter(lambda: list(islice(pairs, self.accumulate)), [])

    def steps_left(self, samples_seen: int) -> int | None:
        """Return how many steps of the epoch are left; None if the data has no length."""
        accumulate, steps = self.accumulate, self.steps_per_epoch
        # With a TrainSampler, a loader's length is the number of batches after its start.
        batches = length_or_none(self.loader) if steps is None else steps * accumulate
        if batches is None:
            return None
        start = 0 if self._sampler is None else self._sampler.samples_seen
        taken = (samples_seen - start) // self.samples_per_batch
        return -(-max(0, batches - taken) // accumulate)

    def _endless(self) -> Generator[Any, None, None]:
        """Yield the stream's batches, again from the beginning when it ends."""
        while True:
            batch = None
            for batch in self.loader:
                yield batch
            if batch is None:
                raise ValueError("the stream gave no batch: each rank needs at least one")

    def _check_lengths(self) -> None:
        """Check that an epoch has the same number of steps on all ranks (collective)."""
        items, batches = length_or_none(self.loader.dataset), length_or_none(self.loader)
        if self.steps_per_epoch is not None:
            items = batches = None  # streams may differ in length, but not in the number of steps
        steps = self.steps_per_epoch
        check_same(self.world_size > 1, items=items, batches=batches, steps_per_epoch=steps)


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
    """Return the length of a data set or a loader; None if it has none."""
    try:
        return len(data)
    except TypeError:
        return None


def _rank_and_world_size(rank: int | None, world_size: int | None) -> tuple[int, int]:
    grouped = dist.is_available() and dist.is_initialized()
    own, size = (dist.get_rank(), dist.get_world_size()) if grouped else (0, 1)
    return own if rank is None else rank, size if world_size is None else world_size


def _unpack(data: Any, batch_size: int | None, given: Any) -> tuple[Any, dict[str, Any]]:
    """Return the data set and the loader's options: an existing loader's, unless `given`."""
    if given.get("in_order") is False:
        raise ValueError("in_order=False would mix up the order of the samples: leave it out")
    options: dict[str, Any] = {}
    if isinstance(data, DataLoader):
        kind = type(data)
        usual = kind._get_iterator in (DataLoader._get_iterator, Loader._get_iterator)
        if not usual or kind.__iter__ is not DataLoader.__iter__:  # PyG's NeighborLoader, for one
            raise ValueError(
                f"{kind.__name__} makes its batches in its own __iter__ or _get_iterator, so it "
                "cannot be sharded: pass its data set, or an IterableDataset that yields batches"
            )
        kept = KEPT_OPTIONS + (WORKER_OPTIONS if given.get("num_workers", data.num_workers) else ())
        options = {name: getattr(data, name) for name in kept}
        if data.batch_size is None:
            options["batch_sampler"] = data.batch_sampler
        elif (shuffles := _shuffles(data.sampler)) is not None:
            options["shuffle"] = shuffles
        elif not isinstance(data.dataset, IterableDataset):
            options["sampler"] = data.sampler
        data = data.dataset
    if isinstance(data, SeededDataset):  # from a loader of ours
        options["collate_fn"], data = data.collate_fn, data.dataset
    options |= {name: value for name, value in given.items() if value is not None}
    if batch_size is not None:
        options["batch_size"] = batch_size
    elif options.get("batch_sampler") is not None:
        options.pop("batch_size", None)  # DataLoader refuses both together
    return data, {"shuffle": None} | options


def _shuffles(sampler: Any) -> bool | None:
    """Say whether `sampler` shuffles; None if it may not give all items, each once."""
    if isinstance(sampler, TrainSampler):
        return sampler.shuffle
    if type(sampler) is RandomSampler and not sampler.replacement:
        return True if sampler.num_samples == len(sampler.data_source) else None
    return False if type(sampler) is SequentialSampler else None


def _already_collated(batch: Any) -> Any:
    """Return `batch`, which is collated already."""
    return batch


def _check_sampler(name: str, sampler: Any, rank: int, world_size: int) -> None:
    """Raise ValueError unless `sampler` gives this rank its own samples."""
    # Check the sampler inside a BatchSampler, unless the outer one is rank-aware itself.
    inner = sampler if hasattr(sampler, "num_replicas") else getattr(sampler, "sampler", sampler)
    shard = getattr(inner, "rank", None), getattr(inner, "num_replicas", None)
    if world_size > 1 and shard != (rank, world_size):
        raise ValueError(
            f"the {name} must be for rank {rank} of {world_size}, but the (rank, num_replicas) of "
            f"this {type(inner).__name__} is {shard}: use a DistributedSampler, or leave out the "
            f"{name} (for some of the items, pass a Subset)"
        )
