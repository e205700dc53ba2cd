"""Which samples each rank sees, in which order, and with which random numbers."""

import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, Sampler, Subset, TensorDataset, default_collate

from ..randomness import generator_state, seed_from, set_generator_state


class TrainSampler(Sampler[int]):
    """Give a rank its samples, starting anywhere in any epoch.

    It gives keys, epoch * size + index, which also tell a worker the epoch. Order and padding are
    those of torch's DistributedSampler for the same seed and epoch: up to num_replicas - 1 items
    are repeated, so that all ranks take the same number of steps. `samples_seen` counts the
    samples of the epoch that all ranks together have seen. They are always a prefix of one
    permutation, so the number means the same at every world size.
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
        return iter((self.epoch * self.size + left[self.rank :: self.num_replicas]).tolist())

    def __len__(self) -> int:
        return -(-max(0, self.size - self.samples_seen) // self.num_replicas)


class SeededDataset(Dataset[Any]):
    """Look up a TrainSampler's keys, with random numbers that depend on (seed, epoch, index).

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
        self._size = len(dataset)  # type: ignore[arg-type]  # train_loader has checked it
        self._epoch = -1  # of the last `set_epoch`

    def __len__(self) -> int:
        return self._size

    def __getitems__(self, keys: Sequence[int]) -> Any:
        data, size = self.dataset, self._size
        if (epoch := keys[0] // size) != self._epoch:
            self._epoch = epoch
            if callable(set_epoch := getattr(data, "set_epoch", None)):  # here, also in a worker
                set_epoch(epoch)
        if self.collate_fn is default_collate and (rows := _rows(data, keys, size)):
            return rows
        look_up = None if type(data) is Subset else getattr(data, "__getitems__", None)
        state = generator_state()
        try:
            if look_up is None:
                return self.collate_fn([self._sample(*divmod(key, size)) for key in keys])
            self._seed_generators(*divmod(keys[0], size))
            return self.collate_fn(look_up([key % size for key in keys]))
        finally:
            set_generator_state(state)

    def _sample(self, epoch: int, index: int) -> Any:
        self._seed_generators(epoch, index)
        return self.dataset[index]

    def _seed_generators(self, epoch: int, index: int) -> None:
        """Seed the CPU's generators. `seed_everything` would also seed CUDA's, for each sample."""
        number = seed_from(self.seed, epoch, index)
        torch.default_generator.manual_seed(number)
        random.seed(number)
        np.random.seed(number % 2**32)


def _rows(dataset: Any, keys: Sequence[int], size: int) -> list[Tensor] | None:
    """Return what default_collate makes of these items, or None if they are looked up one by one.

    Only a TensorDataset, or a Subset of one, has rows; a subclass may look them up in its own way.
    """
    rows = torch.tensor(keys) % size
    while type(dataset) is Subset:
        rows = torch.tensor([int(dataset.indices[row]) for row in rows.tolist()])
        dataset = dataset.dataset
    if type(dataset) is not TensorDataset or any(type(t) is not Tensor for t in dataset.tensors):
        return None
    try:
        # Indexing may keep the memory layout of a permuted tensor; stacking rows would not.
        return [tensor[rows].contiguous() for tensor in dataset.tensors]
    except NotImplementedError:  # for some layouts, and some dtypes, such as uint16 in torch 2.8
        return None
