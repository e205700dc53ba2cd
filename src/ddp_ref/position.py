"""Where in its data a run is: how far an epoch has come, and how it goes on from there.

With a TrainSampler a position counts the samples that all ranks have drawn of the epoch, with a
sampler of the user's own the batches that each rank has.
"""

from collections.abc import Iterator
from itertools import islice
from typing import Any

from torch.utils.data import DataLoader, IterableDataset, SequentialSampler

from .data import BaseSeeds, TrainSampler


def set_place(loader: DataLoader[Any], epoch: int, position: int, rank: int) -> None:
    """Set where the next iteration begins: at `position` of `epoch`."""
    if isinstance(loader.sampler, TrainSampler):
        loader.sampler.start(epoch, position)
    elif isinstance(loader.generator, BaseSeeds):
        loader.generator.start(epoch, rank)
    for sampler in _samplers(loader):
        if hasattr(sampler, "set_epoch"):
            sampler.set_epoch(epoch)


def batches_from(loader: DataLoader[Any], position: int) -> Iterator[Any]:
    """Return the batches of this rank from `position` on; the iterator is made at once."""
    batches = iter(loader)
    if not isinstance(loader.sampler, TrainSampler):  # which begins there
        next(islice(batches, position, position), None)  # at once: they may draw random numbers
    return batches


def batches_left(loader: DataLoader[Any], position: int) -> int | None:
    """Return how many batches this rank has from `position` on; None for a stream."""
    sampler, size = loader.sampler, loader.batch_size
    if not isinstance(sampler, TrainSampler):
        try:
            return max(0, len(loader) - position)
        except TypeError:
            return None
    assert size is not None
    samples = -(-max(0, sampler.size - position) // sampler.world_size)
    return samples // size if loader.drop_last else -(-samples // size)


def position_after(loader: DataLoader[Any], position: int, batches: int) -> int:
    """Return the position after `batches` more batches on each rank; past the end for the last.

    What was drawn counts, not what a collate_fn has made of it.
    """
    sampler = loader.sampler
    if not isinstance(sampler, TrainSampler):
        return position + batches
    assert loader.batch_size is not None
    return position + batches * loader.batch_size * sampler.world_size


def has_known_order(loader: DataLoader[Any]) -> bool:
    """Say whether the order of an epoch is the same each time it is begun."""
    if isinstance(loader.sampler, TrainSampler) or isinstance(loader.dataset, IterableDataset):
        return True
    return any(
        hasattr(sampler, "set_epoch") or isinstance(sampler, SequentialSampler)
        for sampler in _samplers(loader)
    )


def data_of(loader: DataLoader[Any], world_size: int) -> dict[str, int | None]:
    """Return what a position within an epoch depends on."""
    if isinstance(loader.sampler, TrainSampler):
        return {"samples": loader.sampler.size, "world_size": None}  # it goes on at any world size
    return {"samples": None, "world_size": world_size}


def check_same_data(was: dict[str, int | None], now: dict[str, int | None]) -> None:
    """Raise ValueError where an epoch that was begun with other data cannot go on."""
    for name, value in was.items():
        if value != now[name]:
            raise ValueError(
                f"an epoch that was begun with {was} cannot go on with {now}: give the same data "
                "and sampler, and of a sampler of your own as many ranks; or load the checkpoint "
                "of an epoch's end"
            )


def _samplers(loader: DataLoader[Any]) -> list[Any]:
    outer = loader.batch_sampler if loader.batch_sampler is not None else loader.sampler
    return [outer, getattr(outer, "sampler", None)]
