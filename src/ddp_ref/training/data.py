"""The loaders that give each rank its batches, for `Handler` and for training loops of your own."""

from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset
from torch.utils.data.sampler import RandomSampler, SequentialSampler

from ..collectives import exchange_objects
from .loader_workers import Loader
from .samplers import SeededDataset, ShardSampler, TrainSampler

# What a rebuilt loader has of the old one, and what only one with workers can have.
KEPT = ("num_workers", "collate_fn", "pin_memory", "drop_last", "worker_init_fn")
OF_WORKERS = ("timeout", "multiprocessing_context", "prefetch_factor", "persistent_workers")


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

    It has a TrainSampler and seeds each sample (see SeededDataset). In your own loop, call
    `loader.sampler.set_epoch(epoch)` before each epoch.

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
        seed: The seed of the order and of the samples' random numbers.
        **loader: Anything else that DataLoader takes.

    Raises:
        ValueError: If the data or the sampler cannot be used as described.
    """
    rank, world_size = _shard(rank, world_size)
    dataset = _data_of(data)
    if isinstance(data, DataLoader):
        sampler = data.sampler
        loader = _options_of(data, loader)
        batch_size = batch_size or data.batch_size
        if data.batch_sampler is not None and data.batch_size is None:
            loader.setdefault("batch_sampler", data.batch_sampler)
        elif isinstance(sampler, TrainSampler):
            shuffle = sampler.shuffle if shuffle is None else shuffle
        elif type(sampler) is SequentialSampler:
            shuffle = bool(shuffle)
        elif not (isinstance(dataset, IterableDataset) or _is_shuffle(sampler)):
            loader.setdefault("sampler", sampler)
    own = next((n for n in ("batch_sampler", "sampler") if loader.get(n) is not None), None)
    if own:
        _check_sampler(own, loader[own], rank, world_size)
    elif isinstance(dataset, IterableDataset):
        shuffle = None
    else:
        check_count("batch_size", batch_size)
        shard = {"rank": rank, "world_size": world_size, "seed": seed}
        loader["sampler"] = TrainSampler(length_of(dataset), shuffle=shuffle is not False, **shard)
        dataset, shuffle = SeededDataset(dataset, seed, loader.get("collate_fn")), None
        loader["collate_fn"] = _already_collated
    if own != "batch_sampler":
        loader["batch_size"] = batch_size
    return Loader(dataset, shuffle=shuffle, **loader)


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
    rank, world_size = _shard(rank, world_size)
    changing = [n for n in ("shuffle", "sampler", "batch_sampler", "drop_last") if loader.get(n)]
    if changing:
        raise ValueError(f"evaluation uses all items in order: leave out {', '.join(changing)}")
    dataset = _data_of(data)
    if isinstance(dataset, IterableDataset):
        raise ValueError(
            "evaluation needs a data set with a length, and an IterableDataset has none: "
            "make a list of its items"
        )
    if isinstance(data, DataLoader):
        whole = SequentialSampler, ShardSampler, TrainSampler, DistributedSampler
        own = (data.batch_size is None and data.batch_sampler) or data.sampler
        if not (type(own) in whole or _is_shuffle(own)):
            raise ValueError(
                f"evaluation uses each item once, but a {type(own).__name__} may not: pass a "
                "Subset with these items, and no sampler or batch_sampler"
            )
        loader, batch_size = _options_of(data, loader), batch_size or data.batch_size
        loader["drop_last"] = False
    check_count("batch_size", batch_size)
    loader["sampler"] = ShardSampler(length_of(dataset), rank=rank, world_size=world_size)
    return Loader(dataset, batch_size=batch_size, **loader)


def length_of(dataset: Any) -> int:
    """Return the length of `dataset`, or raise ValueError if it has none."""
    if isinstance(dataset, Mapping):
        raise ValueError(
            f"the data must be one data set, not a dict of {', '.join(map(str, dataset))}: pass "
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


def check_same(**numbers: int | None) -> None:
    """Raise ValueError, on all ranks, unless all ranks pass the same `numbers` (collective)."""
    every = exchange_objects(numbers)
    for what, number in numbers.items():
        if len(passed := {str(other[what]) for other in every}) > 1:
            raise ValueError(
                f"all ranks must have the same data, but this rank has {number} {what} (all ranks: "
                f"{' or '.join(sorted(passed))}): seed random data alike, read only complete files"
            )


def check_count(name: str, value: object) -> None:
    """Raise ValueError unless `value` is an integer of at least 1."""
    if type(value) is not int or value < 1:
        raise ValueError(f"{name} must be an integer of at least 1, not {value!r}")


def _shard(rank: int | None, world_size: int | None) -> tuple[int, int]:
    grouped = dist.is_available() and dist.is_initialized()
    own, size = (dist.get_rank(), dist.get_world_size()) if grouped else (0, 1)
    return own if rank is None else rank, size if world_size is None else world_size


def _options_of(loader: DataLoader[Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of the rebuilt loader, which are those of `loader` unless `given`."""
    kind = type(loader)
    usual = kind._get_iterator in (DataLoader._get_iterator, Loader._get_iterator)
    if not usual or kind.__iter__ is not DataLoader.__iter__:  # PyG's NeighborLoader, for one
        raise ValueError(
            f"{kind.__name__} makes its batches in its own __iter__ or _get_iterator, so it cannot "
            "be sharded: pass its data set, or an IterableDataset that yields its batches"
        )
    kept = KEPT + (OF_WORKERS if given.get("num_workers", loader.num_workers) else ())
    options = {name: getattr(loader, name) for name in kept}
    if isinstance(loader.dataset, SeededDataset):
        options["collate_fn"] = loader.dataset.collate_fn
    return options | dict(given)


def _data_of(data: Any) -> Any:
    """Return the user's data set in `data`, which may be a loader."""
    if isinstance(data, DataLoader):
        data = data.dataset
    return data.dataset if isinstance(data, SeededDataset) else data


def _is_shuffle(sampler: Any) -> bool:
    """Say whether `sampler` is what DataLoader(shuffle=True) makes: all items, each once."""
    plain = type(sampler) is RandomSampler and not sampler.replacement
    return plain and sampler.num_samples == len(sampler.data_source)


def _already_collated(batch: Any) -> Any:
    """Return `batch`, which is collated already."""
    return batch


def _check_sampler(name: str, sampler: Any, rank: int, world_size: int) -> None:
    """Raise ValueError unless `sampler` gives this rank its own samples."""
    inner = getattr(sampler, "sampler", sampler)  # the one inside a BatchSampler
    shard = getattr(inner, "rank", None), getattr(inner, "num_replicas", None)
    if world_size > 1 and shard != (rank, world_size):
        raise ValueError(
            f"the {name} must be for rank {rank} of {world_size}, but the (rank, num_replicas) of "
            f"this {type(inner).__name__} is {shard}: use a DistributedSampler, or leave out the "
            f"{name} (for some of the items, pass a Subset)"
        )
