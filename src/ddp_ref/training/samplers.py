"""Which samples each rank sees, in which order, and with which random numbers."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset, Sampler, Subset, TensorDataset, default_collate

from ..randomness import borrowed_generators, seed_host


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
        order = self._order()
        left = order[self.samples_seen :]
        padding = -len(left) % self.num_replicas
        left += (order * -(-padding // self.size))[:padding]
        return ((self.epoch, index) for index in left[self.rank :: self.num_replicas])

    def __len__(self) -> int:
        return -(-max(0, self.size - self.samples_seen) // self.num_replicas)

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

    A data set with a `__getitems__` of its own is seeded once per batch, so there the augmentation
    depends on how batches are made up. (`Subset` has one too, but its items are looked up one by
    one.) A TensorDataset draws no random numbers, and its rows are looked up a batch at once, which
    is several times as fast.
    """

    def __init__(
        self, dataset: Dataset[Any], seed: int, collate_fn: Callable[[list[Any]], Any] | None
    ) -> None:
        self.dataset, self.seed, self.collate_fn = dataset, seed, collate_fn or default_collate
        self.whole_rows = collate_fn is None and _has_rows(dataset)

    def __len__(self) -> int:
        return len(self.dataset)  # type: ignore[arg-type]  # train_loader checked that it has one

    def __getitems__(self, keys: Sequence[tuple[int, int]]) -> Any:
        indices = [index for _, index in keys]
        if self.whole_rows:
            return _rows(self.dataset, indices)
        look_up = None if type(self.dataset) is Subset else _own_getitems(self.dataset)
        with borrowed_generators():
            if look_up is None:
                return self.collate_fn([self._sample(epoch, index) for epoch, index in keys])
            seed_host(self.seed, *keys[0])
            return self.collate_fn(look_up(indices))

    def _sample(self, epoch: int, index: int) -> Any:
        seed_host(self.seed, epoch, index)
        return self.dataset[index]


def _own_getitems(dataset: Any) -> Callable[[list[int]], list[Any]] | None:
    return getattr(dataset, "__getitems__", None)


def _has_rows(dataset: Any) -> bool:
    """Say whether `_rows` works; a subclass may look its items up in its own way."""
    while type(dataset) is Subset:
        dataset = dataset.dataset
    return type(dataset) is TensorDataset and all(map(_is_plain, dataset.tensors))


def _is_plain(tensor: Tensor) -> bool:
    """Say whether indexing many rows of `tensor` gives the same as stacking them one by one."""
    if type(tensor) is not Tensor or tensor.layout is not torch.strided or tensor.is_nested:
        return False
    try:
        tensor[torch.zeros(len(tensor[:1]), dtype=torch.long)]
    except NotImplementedError:  # some dtypes, such as uint16 in torch 2.8
        return False
    return True


def _rows(dataset: Any, indices: list[int]) -> list[Tensor]:
    """Return what default_collate makes of these items of a TensorDataset, or a Subset of one."""
    while isinstance(dataset, Subset):
        indices = [int(dataset.indices[index]) for index in indices]
        dataset = dataset.dataset
    rows = torch.tensor(indices)
    # Indexing may keep the memory layout of a permuted tensor; stacking rows would not.
    return [tensor[rows].contiguous() for tensor in dataset.tensors]
