"""Record where in an epoch a run is, and continue from there.

`samples_seen` counts the samples of the epoch that all ranks together have drawn, if the loader has
our TrainSampler. With a sampler of the user's own nobody knows the global order, so there it counts
the batches that each rank has drawn.
"""

from collections.abc import Iterator
from itertools import islice
from typing import Any

from torch.utils.data import DataLoader, IterableDataset, SequentialSampler

from .data import BaseSeeds, TrainSampler


def seek(loader: DataLoader[Any], epoch: int, samples_seen: int, rank: int) -> None:
    """Make the next iteration over `loader` start after `samples_seen` samples of `epoch`."""
    if isinstance(loader.sampler, TrainSampler):
        loader.sampler.start(epoch, samples_seen)
    elif isinstance(loader.generator, BaseSeeds):
        loader.generator.start(epoch, rank)
    for sampler in _samplers(loader):
        if hasattr(sampler, "set_epoch"):
            sampler.set_epoch(epoch)


def batches_from(loader: DataLoader[Any], samples_seen: int) -> Iterator[Any]:
    """Return an iterator over this rank's remaining batches. `iter(loader)` is called at once."""
    batches = iter(loader)
    if not isinstance(loader.sampler, TrainSampler):  # samples_seen is in batches here
        # Skip now, not at the first `next`: the skipped batches may draw random numbers.
        next(islice(batches, samples_seen, samples_seen), None)
    return batches


def batches_left(loader: DataLoader[Any], samples_seen: int) -> int | None:
    """Return how many batches of the epoch this rank has left; None if the loader has no length."""
    sampler, size = loader.sampler, loader.batch_size
    if not isinstance(sampler, TrainSampler):
        try:
            return max(0, len(loader) - samples_seen)  # both in batches
        except TypeError:
            return None
    assert size is not None
    samples = -(-max(0, sampler.size - samples_seen) // sampler.world_size)
    return samples // size if loader.drop_last else -(-samples // size)


def samples_seen_after(loader: DataLoader[Any], samples_seen: int, batches: int) -> int:
    """Return `samples_seen` after `batches` more batches on each rank.

    The last batch may take it beyond the end of the epoch. Samples count as they are drawn,
    whatever a collate_fn makes of them.
    """
    sampler = loader.sampler
    if not isinstance(sampler, TrainSampler):
        return samples_seen + batches  # both in batches
    assert loader.batch_size is not None
    return samples_seen + batches * loader.batch_size * sampler.world_size


def order_is_reproducible(loader: DataLoader[Any]) -> bool:
    """Say whether an epoch that starts again draws its samples in the same order."""
    if isinstance(loader.sampler, TrainSampler) or isinstance(loader.dataset, IterableDataset):
        return True
    return any(
        hasattr(sampler, "set_epoch") or isinstance(sampler, SequentialSampler)
        for sampler in _samplers(loader)
    )


def data_fingerprint(loader: DataLoader[Any], world_size: int) -> dict[str, int | None]:
    """Return what must stay the same for `samples_seen` to keep its meaning; None means anything.

    A TrainSampler can resume at any world size, any other sampler only at the same one.
    """
    if isinstance(loader.sampler, TrainSampler):
        return {"samples": loader.sampler.size, "world_size": None}
    return {"samples": None, "world_size": world_size}


def check_same_data(was: dict[str, int | None], now: dict[str, int | None]) -> None:
    """Raise ValueError if an epoch that started with other data cannot go on with the data now."""
    for name, value in was.items():
        if value != now[name]:
            raise ValueError(
                f"an epoch that started with {was} cannot go on with {now}: use the same data and "
                "sampler, and with a sampler of your own the same number of ranks; or load a "
                "checkpoint from the end of an epoch"
            )


def _samplers(loader: DataLoader[Any]) -> list[Any]:
    outer = loader.batch_sampler if loader.batch_sampler is not None else loader.sampler
    return [outer, getattr(outer, "sampler", None)]
