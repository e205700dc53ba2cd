"""This rank's training batches: where an epoch starts, and when it ends."""

import warnings
from collections.abc import Generator, Iterator
from itertools import islice
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from ..randomness import seed_from
from .data import check_count, length_or_none
from .loader_workers import Loader
from .samplers import TrainSampler
from .train_state import TrainState


class TrainBatches:
    """The batches of `loader`, one list for each optimizer step.

    Args:
        loader: This rank's loader, from `train_loader`.
        handler: The Handler, for its rank, seed and `accumulate`.
        steps_per_epoch: Optimizer steps per epoch, for an IterableDataset; None to go to its end.

    Raises:
        ValueError: If an IterableDataset on several ranks has no `steps_per_epoch`, or a data set
            with a length has it.
    """

    def __init__(self, loader: DataLoader[Any], handler: Any, steps_per_epoch: int | None) -> None:
        world_size = handler.info.world_size
        is_stream = isinstance(loader.dataset, IterableDataset)
        if steps_per_epoch is not None:
            check_count("steps_per_epoch", steps_per_epoch)
            if not is_stream:
                raise ValueError(
                    "steps_per_epoch is for an IterableDataset: this data has a length"
                )
        elif is_stream and world_size > 1:
            raise ValueError(
                f"an IterableDataset on {world_size} ranks needs steps_per_epoch, because the "
                "ranks could have different numbers of batches"
            )
        self.loader, self.handler, self.steps_per_epoch = loader, handler, steps_per_epoch
        self._sampler = loader.sampler if isinstance(loader.sampler, TrainSampler) else None
        # A batch sampler without a batch_size counts each of its batches as one sample.
        batch_size = loader.batch_size or getattr(loader.batch_sampler, "batch_size", None) or 1
        #: how many samples all ranks together draw in one batch each
        self.samples_per_batch = batch_size * world_size
        self._stream = self._endless()

    def rewind(self) -> None:
        """Read a stream from its beginning again, and end the workers that read it so far."""
        self._stream.close()
        self._stream = self._endless()

    def seek(self, state: TrainState) -> bool:
        """Make `windows` start where `state` is; return False if the epoch must start again.

        Only a TrainSampler can start in the middle of an epoch, at any world size.

        Raises:
            ValueError: If the epoch started with another data set, or another order of it.
        """
        own = self._sampler
        data = {"samples": getattr(own, "size", None), "shuffle": getattr(own, "shuffle", None)}
        if state.samples_seen and state.data != data:
            raise ValueError(
                f"an epoch that started with {state.data} cannot go on with {data}: use the same "
                "data, shuffle and sampler, or load a checkpoint from the end of an epoch"
            )
        state.data = data
        if isinstance(self.loader, Loader) and not self.loader.has_own_generator:
            seed = seed_from(self.handler.seed, state.epoch, self.handler.rank)
            self.loader.generator.manual_seed(seed)  # of a plain sampler, and of the workers
        if self._sampler:
            self._sampler.set_epoch(state.epoch, state.samples_seen)
            return True
        outer = self.loader.batch_sampler
        for sampler in (self.loader.sampler, outer, getattr(outer, "sampler", None)):
            if callable(set_epoch := getattr(sampler, "set_epoch", None)):
                set_epoch(state.epoch)
        if state.samples_seen:
            warnings.warn(
                f"epoch {state.epoch + 1} starts again, because only Handler's own sampler can "
                "continue in the middle of an epoch",
                stacklevel=2,
            )
        return not state.samples_seen

    def windows(self) -> Iterator[list[Any]]:
        """Yield the batches of each remaining optimizer step of the epoch."""
        accumulate = self.handler.accumulate
        if self.steps_per_epoch is None:
            batches: Iterator[Any] = iter(self.loader)
        else:
            batches = islice(self._stream, self.steps_per_epoch * accumulate)
        while window := list(islice(batches, accumulate)):
            yield window

    def steps_left(self, samples_seen: int) -> int | None:
        """Return how many steps of the epoch are left; None if the data has no length."""
        accumulate = self.handler.accumulate
        steps = self.steps_per_epoch
        # With a TrainSampler, a loader's length is the number of batches after its start.
        batches = length_or_none(self.loader) if steps is None else steps * accumulate
        if batches is None:
            return None
        start = self._sampler.samples_seen if self._sampler else 0
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
