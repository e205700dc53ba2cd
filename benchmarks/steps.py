"""A training step of `Handler`, accelerate, Lightning and ignite, compared with a raw DDP loop.

All train the same model on the same data in the same two processes, with one thread each, and take
turns of ten steps. The benchmark fails unless all end with the same weights, bit for bit. Memory
addresses can make one loop faster for as long as a process lives, so we start the processes 24
times. The usual loader looks up the samples of a batch one by one. `Handler` looks up a batch "at
once", in one call, if the data set is a TensorDataset, so a raw and a Fabric loop do that, too.
The course's data set is a subclass of TensorDataset. A data set with a `__getitem__` of its own is
always looked up one by one.
"""

import logging
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from random import Random
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from side_by_side import AGAIN, Times, compare
from tables import Table, duration, goal
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import BatchSampler, DataLoader, Dataset, TensorDataset
from torch.utils.data.distributed import DistributedSampler
from turns import Tick, Ticks, in_launches, steps_of, take_turns

from datautils import MyTrainDataset
from ddp_ref import Handler, initialize_ddp

PACKAGES = "accelerate", "lightning", "pytorch-ignite"  # whose versions are printed
ROUNDS, LAUNCHES = 240, 24
BATCH, FEATURES, CLASSES = 32, 64, 10
BACKENDS = {"cpu": "gloo", "cuda": "nccl"}
Loop = Callable[[nn.Module, Any, Tick], None]
LoaderOf = Callable[[Any], DataLoader[Any]]
WIDTHS = {"a small step (five layers, 64 wide)": 64, "a larger step (five layers, 384 wide)": 384}
RAW, AT_ONCE, OURS = "raw DDP", "raw DDP, batches looked up at once", "Handler"
FABRIC, FABRIC_AT_ONCE = "Lightning Fabric", "Lightning Fabric, batches looked up at once"
MOST_OVERHEAD = 0.02  # of raw DDP's time
MOST_OVERHEAD_SAME_LOADER = {64: 0.05, 384: 0.02}  # by width


def measure(rounds: int) -> list[Table]:
    small, large = (measure_size(title, width, rounds) for title, width in WIDTHS.items())
    others = [measure_data(kind, rounds) for kind in (MyTrainDataset, Items)]
    return [replace(small, notes=[*small.notes, *others]), large]


def measure_size(title: str, width: int, rounds: int) -> Table:
    times, part = in_launches(times_on_rank, width, rounds=rounds, launches=LAUNCHES)
    notes = [
        overhead(times, RAW, MOST_OVERHEAD, part),
        overhead(times, AT_ONCE, MOST_OVERHEAD_SAME_LOADER[width], part),
        f"Time added to that loop: {added_time(times, AT_ONCE, (OURS, FABRIC_AT_ONCE), part)}.",
    ]
    return Table(title, compare(times, part), notes)


def measure_data(kind: type[Any], rounds: int) -> str:
    """Measure the small step with another data set, in loops that look it up in the same way."""
    base, fabric = (RAW, FABRIC) if kind is Items else (AT_ONCE, FABRIC_AT_ONCE)
    work = partial(times_on_rank, kind=kind, names=(base, OURS, fabric))
    times, part = in_launches(work, 64, rounds=rounds, launches=LAUNCHES)
    name = "a data set's own __getitem__" if kind is Items else "the course's data set"
    return f"With {name}, added to {base}: {added_time(times, base, (OURS, fabric), part)}."


def overhead(times: Times, base: str, limit: float, part: int = 1) -> str:
    """Return the goal about `Handler` and the loop `base`, and whether it is reached."""
    _, row = compare({name: times[name] for name in (base, OURS)}, part)
    measured = f"{row.ratio - 1:+.1%}, {row.low - 1:+.1%} to {row.high - 1:+.1%}"
    target = f"{OURS} at most {limit:.0%} slower than {base}"
    return goal(target, measured, row.at_most(1 + limit))


def added_time(times: Times, base: str, names: Sequence[str], part: int = 1) -> str:
    """Return the time that each loop adds to the loop `base`, with its interval."""
    first, *rows = compare({name: times[name] for name in (base, *names)}, part)
    texts = []
    for row in rows:
        seconds = [(ratio - 1) * first.seconds for ratio in (row.ratio, row.low, row.high)]
        added, low, high = (f"{'-' if each < 0 else '+'}{duration(abs(each))}" for each in seconds)
        texts.append(f"{row.name} {added} ({low} to {high})")
    return "; ".join(texts)


def make_model(width: int) -> nn.Module:
    torch.manual_seed(0)
    hidden = [layer for _ in range(3) for layer in (nn.Linear(width, width), nn.ReLU())]
    return nn.Sequential(nn.Linear(FEATURES, width), nn.ReLU(), *hidden, nn.Linear(width, CLASSES))


class Items(Dataset[Any]):
    """A data set that looks up one item, as most people's do."""

    def __init__(self, inputs: torch.Tensor, targets: torch.Tensor) -> None:
        self.inputs, self.targets = inputs, targets

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> Any:
        return self.inputs[index], self.targets[index]


def make_data(steps: int, ranks: int, kind: type[Any] = TensorDataset) -> Dataset[Any]:
    size = ranks * BATCH * steps
    if kind is MyTrainDataset:  # repeated, for one epoch of all steps
        data = MyTrainDataset()
        rows = torch.arange(size) % len(data)
        data.tensors = tuple(tensor[rows] for tensor in data.tensors)
        return data
    inputs = torch.randn(size, FEATURES, generator=torch.Generator().manual_seed(0))
    return kind(inputs, inputs[:, :CLASSES].argmax(1))


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


def usual_loader(data: Dataset[Any]) -> DataLoader[Any]:
    """Return a loader of this rank's batches, in the same order as `Handler`'s."""
    return DataLoader(data, BATCH, sampler=DistributedSampler(data))


def loader_at_once(data: Dataset[Any], batch: int = BATCH) -> DataLoader[Any]:
    """Return a loader that looks up each of these batches in one call, as `Handler` does."""
    rows = BatchSampler(DistributedSampler(data), batch, drop_last=False)
    pin = torch.cuda.is_available()  # as `Handler` does
    return DataLoader(data, batch_size=None, sampler=rows, pin_memory=pin)


# The loops. The peers train on the CPU only.


def raw(model: nn.Module, data: Any, tick: Tick, loader_of: LoaderOf = usual_loader) -> None:
    device = next(model.parameters()).device
    replica, optimizer = DDP(model), make_optimizer(model)
    for inputs, targets in loader_of(data):
        optimizer.zero_grad()
        outputs = replica(inputs.to(device, non_blocking=True))  # as Handler does
        F.cross_entropy(outputs, targets.to(device, non_blocking=True)).backward()
        optimizer.step()
        tick()


def handler(model: nn.Module, data: Dataset[Any], tick: Tick) -> None:
    made = Handler(
        model,
        make_optimizer(model),
        F.cross_entropy,
        callbacks=[Ticks(tick)],
        device=next(model.parameters()).device,
        use_distributed=True,
        log=lambda _: None,
    )
    made.set_train_loader(data, BATCH)
    made.train(1)


def accelerate(model: nn.Module, data: Dataset[Any], tick: Tick) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    # The loader is not prepared, because accelerate would then shard the data differently.
    replica, optimizer = accelerator.prepare(model, make_optimizer(model))
    for inputs, targets in usual_loader(data):
        optimizer.zero_grad()
        accelerator.backward(F.cross_entropy(replica(inputs), targets))
        optimizer.step()
        tick()


def fabric(model: nn.Module, data: Any, tick: Tick, loader_of: LoaderOf = usual_loader) -> None:
    from lightning.fabric import Fabric

    made = Fabric(accelerator="cpu", strategy="ddp", devices=dist.get_world_size())
    made.launch()
    replica, optimizer = made.setup(model, make_optimizer(model))
    for inputs, targets in made.setup_dataloaders(loader_of(data), use_distributed_sampler=False):
        optimizer.zero_grad()
        made.backward(F.cross_entropy(replica(inputs), targets))
        optimizer.step()
        tick()


def trainer(model: nn.Module, data: Dataset[Any], tick: Tick) -> None:
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            inputs, targets = batch
            return F.cross_entropy(self.model(inputs), targets)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return make_optimizer(model)

        def on_train_batch_end(self, *_: Any) -> None:
            tick()

    made = lightning.Trainer(
        accelerator="cpu",
        strategy="ddp",
        devices=dist.get_world_size(),
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    made.fit(Module(), usual_loader(data))


def ignite(model: nn.Module, data: Dataset[Any], tick: Tick) -> None:
    import ignite.distributed as idist
    from ignite.engine import Events, create_supervised_trainer

    optimizer = make_optimizer(model)
    made = create_supervised_trainer(idist.auto_model(model), optimizer, F.cross_entropy)
    made.add_event_handler(Events.ITERATION_COMPLETED, tick)
    made.run(usual_loader(data), max_epochs=1)


OWN_LOOPS: dict[str, Loop] = {
    RAW: raw,
    RAW + AGAIN: raw,
    AT_ONCE: partial(raw, loader_of=loader_at_once),
    OURS: handler,
}
PEERS: dict[str, Loop] = {
    "accelerate": accelerate,
    FABRIC: fabric,
    FABRIC_AT_ONCE: partial(fabric, loader_of=loader_at_once),
    "Lightning Trainer": trainer,
    "ignite": ignite,
}


def times_on_rank(
    width: int,
    rounds: int,
    device: str = "cpu",
    check: bool = True,
    seed: int = 0,
    kind: type[Any] = TensorDataset,
    names: Sequence[str] = (),
) -> Times:
    """Return the seconds of a step, by loop and round; with `check`, raise if weights differ.

    `kind` is the class of the data set. `names` are those of the loops to time, or all.
    """
    ranks = initialize_ddp(backend=BACKENDS[device], use_distributed=True).world_size
    logging.disable(logging.WARNING)  # Lightning sets its loggers' levels when it is imported
    warnings.simplefilter("ignore")  # about the number of the loader's workers
    data = make_data(steps_of(rounds), ranks, kind)
    loops = OWN_LOOPS | (PEERS if device == "cpu" else {})
    loops = {name: loops[name] for name in names or loops}
    return time_loops(loops, lambda: make_model(width).to(device), data, rounds, seed, check)


def time_loops(
    loops: Mapping[str, Loop],
    make_model: Callable[[], nn.Module],
    data: Dataset[Any],
    rounds: int,
    seed: int,
    check: bool,
) -> Times:
    """Let the loops take turns, each with a model of its own; return seconds by loop and round.

    `seed` draws the order in which the models are made, and that of the turns. With `check`, raise
    unless all loops have trained, and to the same weights.
    """
    drawn = Random(seed).sample(list(loops), len(loops))  # the first may get the best of the memory
    models = {name: make_model() for name in drawn}
    turns = {name: partial(loops[name], models[name], data) for name in drawn}
    times = take_turns(turns, rounds, seed)
    if check:
        weights = {name: nn.utils.parameters_to_vector(models[name].parameters()) for name in loops}
        untrained = nn.utils.parameters_to_vector(make_model().parameters())
        for name, own in weights.items():
            assert torch.equal(own, next(iter(weights.values()))), f"{name} trained another model"
            assert not torch.equal(own, untrained), f"{name} has not trained"
    return {name: times[name] for name in loops}
