"""Which samples each rank sees, in which order, and with which random numbers."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset, Sampler, Subset, TensorDataset, default_collate

from ..randomness import preserved_rng_state, seed_host


class ShardSampler(Sampler[int]):
    """Give a rank every num_replicas-th of `size` items: each item goes to exactly one rank."""

    def __init__(self, size: int, *, rank: int, world_size: int) -> None:
        self.rank, self.num_replicas = rank, world_size
        self._indices = range(rank, size, world_size)

    def __iter__(self) -> Iterator[int]:
        return iter(self._indices)

    def __len__(self) -> int:
        return len(self._indices)


class TrainSampler(Sampler[tuple[int, int]]):
    """Give a rank its (epoch, index) pairs, starting anywhere in any epoch.

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

    @property
    def repeated(self) -> int:
        """How many items are repeated in a whole epoch, as padding."""
        return -self.size % self.num_replicas

    def __iter__(self) -> Iterator[tuple[int, int]]:
        order = list(range(self.size))
        if self.shuffle:
            generator = torch.Generator().manual_seed(self.seed + self.epoch)
            order = torch.randperm(self.size, generator=generator).tolist()
        left = order[self.samples_seen :]
        padding = -len(left) % self.num_replicas
        left += (order * -(-padding // self.size))[:padding]
        return ((self.epoch, index) for index in left[self.rank :: self.num_replicas])

    def __len__(self) -> int:
        return -(-max(0, self.size - self.samples_seen) // self.num_replicas)


class SeededDataset(Dataset[Any]):
    """Look up (epoch, index) in `dataset`, with random numbers that depend on (seed, epoch, index).

    The global generators of torch, random and numpy are seeded for each sample and restored after
    the batch, so an augmentation is the same in any process and at any world size. It costs about
    10 microseconds per sample. Batches are collated here: `collate_fn` draws from the generators
    as the last sample left them.

    A data set with a `__getitems__` of its own is seeded once per batch, so there the augmentation
    depends on how batches are made up. (`Subset` has one too, but its items are looked up one by
    one.) A TensorDataset draws no random numbers, and its rows are looked up a batch at once, which
    is several times as fast.
    """

    def __init__(
        self, dataset: Dataset[Any], seed: int, collate_fn: Callable[[list[Any]], Any] | None
    ) -> None:
        self.dataset, self.seed, self.collate_fn = dataset, seed, collate_fn or default_collate

    def __len__(self) -> int:
        return len(self.dataset)  # type: ignore[arg-type]  # train_loader checked that it has one

    def __getitems__(self, keys: Sequence[tuple[int, int]]) -> Any:
        indices = [index for _, index in keys]
        if self.collate_fn is default_collate and (rows := _rows(self.dataset, indices)):
            return rows
        look_up = getattr(self.dataset, "__getitems__", None)
        with preserved_rng_state():
            if look_up is None or type(self.dataset) is Subset:
                return self.collate_fn([self._sample(epoch, index) for epoch, index in keys])
            seed_host(self.seed, *keys[0])
            return self.collate_fn(look_up(indices))

    def _sample(self, epoch: int, index: int) -> Any:
        seed_host(self.seed, epoch, index)
        return self.dataset[index]


def _rows(dataset: Any, indices: list[int]) -> list[Tensor] | None:
    """Return what default_collate makes of these items, or None if they are looked up one by one.

    Only a TensorDataset, or a Subset of one, has rows; a subclass may look them up in its own way.
    """
    while type(dataset) is Subset:
        indices = [int(dataset.indices[index]) for index in indices]
        dataset = dataset.dataset
    if type(dataset) is not TensorDataset or any(type(t) is not Tensor for t in dataset.tensors):
        return None
    rows = torch.tensor(indices)
    try:
        # Indexing may keep the memory layout of a permuted tensor; stacking rows would not.
        return [tensor[rows].contiguous() for tensor in dataset.tensors]
    except NotImplementedError:  # for some layouts, and some dtypes, such as uint16 in torch 2.8
        return None
