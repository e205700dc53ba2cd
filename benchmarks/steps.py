"""A training step of `Handler`, accelerate, Lightning and ignite, compared with a raw DDP loop.

All of them train the same model on the same data, in the same two processes, with one thread each.
The benchmark fails unless all end with the same weights, bit for bit. They take turns of ten steps.
Memory addresses can make one loop faster for as long as a process lives, so we start the processes
24 times. The usual loader looks up the samples of a batch one by one, and `Handler` "at once", in
one call. So there are also a raw loop and a Fabric loop that look up batches at once.
"""

import logging
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from random import Random
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from side_by_side import AGAIN, Row, compare, find
from tables import Table, difference, goal
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import BatchSampler, DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler
from turns import Tick, Ticks, in_launches, steps_of, take_turns

from ddp_ref import Handler, initialize_ddp

ROUNDS, RANKS, LAUNCHES = 720, 2, 24
BATCH, FEATURES, CLASSES = 32, 16, 10
BACKENDS = {"cpu": "gloo", "cuda": "nccl"}
Loop = Callable[[nn.Module, TensorDataset, Tick], None]
WIDTHS = {"a small step (five layers, 64 wide)": 64, "a larger step (five layers, 384 wide)": 384}
RAW, AT_ONCE, OURS = "raw DDP", "raw DDP, batches looked up at once", "Handler"
FABRIC, FABRIC_AT_ONCE = "Lightning Fabric", "Lightning Fabric, batches looked up at once"
ACCELERATE, TRAINER, IGNITE = "accelerate", "Lightning Trainer", "ignite"
MOST_OVERHEAD = 0.02  # of raw DDP's time
MOST_OVERHEAD_SAME_LOADER = {64: 0.05, 384: 0.02}  # by width


def measure(rounds: int) -> list[Table]:
    return [measure_size(title, width, rounds) for title, width in WIDTHS.items()]


def measure_size(title: str, width: int, rounds: int) -> Table:
    times, part = in_launches(times_on_rank, width, rounds=rounds, launches=LAUNCHES, nproc=RANKS)
    rows = compare(times, RAW, part)
    notes = [
        against_raw(rows),
        *with_same_loader(times, part, MOST_OVERHEAD_SAME_LOADER[width]),
    ]
    return Table(title, rows, notes)


def against_raw(rows: Sequence[Row]) -> str:
    """Return the goal about `Handler` and raw DDP, and whether it is reached."""
    row = find(rows, OURS)
    target = f"Handler at most {MOST_OVERHEAD:.0%} slower than raw DDP"
    return goal(target, interval(row), row.at_most(1 + MOST_OVERHEAD))


def with_same_loader(times: Mapping[str, list[float]], part: int, limit: float) -> list[str]:
    """Compare `Handler` and Fabric with the raw loop that, like them, looks up batches at once."""
    same = {name: times[name] for name in (AT_ONCE, OURS, FABRIC_AT_ONCE)}
    base, ours, fabric = compare(same, AT_ONCE, part)
    target = f"Handler at most {limit:.0%} slower than {AT_ONCE}"
    added = [f"{row.name} {added_time(row, base.seconds)}" for row in (ours, fabric)]
    return [
        goal(target, interval(ours), ours.at_most(1 + limit)),
        f"Time added to that loop: {'; '.join(added)}.",
    ]


def added_time(row: Row, base: float) -> str:
    """Return the time that a variant adds to the median `base`, with its interval."""
    low, high = (difference(ratio, base) for ratio in (row.low, row.high))
    return f"{difference(row.ratio, base)} ({low} to {high})"


def interval(row: Row) -> str:
    return f"{row.ratio - 1:+.1%}, {row.low - 1:+.1%} to {row.high - 1:+.1%}"


def make_model(width: int) -> nn.Module:
    torch.manual_seed(0)
    hidden = [layer for _ in range(3) for layer in (nn.Linear(width, width), nn.ReLU())]
    return nn.Sequential(nn.Linear(FEATURES, width), nn.ReLU(), *hidden, nn.Linear(width, CLASSES))


def make_data(steps: int, ranks: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(ranks * BATCH * steps, FEATURES, generator=generator)
    return TensorDataset(inputs, inputs[:, :CLASSES].argmax(1))


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


def make_loader(data: TensorDataset, batch: int = BATCH) -> DataLoader[Any]:
    """Return a loader of this rank's batches, in the same order as `Handler`'s."""
    return DataLoader(data, batch, sampler=DistributedSampler(data))


def loader_at_once(data: TensorDataset, batch: int = BATCH) -> DataLoader[Any]:
    """Return a loader that looks up each of these batches in one call, as `Handler` does."""
    rows = BatchSampler(DistributedSampler(data), batch, drop_last=False)
    return DataLoader(data, batch_size=None, sampler=rows)


def raw(
    model: nn.Module,
    data: TensorDataset,
    tick: Tick,
    loader_of: Callable[[TensorDataset], DataLoader[Any]] = make_loader,
) -> None:
    device = next(model.parameters()).device
    replica, optimizer = DDP(model), make_optimizer(model)
    for inputs, targets in loader_of(data):
        optimizer.zero_grad()
        outputs = replica(inputs.to(device, non_blocking=True))  # as Handler does
        F.cross_entropy(outputs, targets.to(device, non_blocking=True)).backward()
        optimizer.step()
        tick()


def handler(model: nn.Module, data: TensorDataset, tick: Tick) -> None:
    made = Handler(
        model,
        make_optimizer(model),
        F.cross_entropy,
        callbacks=[Ticks(tick)],
        device=next(model.parameters()).device,
        use_distributed=True,
    )
    made.set_train_loader(data, BATCH)
    made.train(1)


def accelerate(model: nn.Module, data: TensorDataset, tick: Tick) -> None:
    from accelerate import Accelerator

    device = next(model.parameters()).device
    accelerator = Accelerator(cpu=device.type == "cpu")
    # The loader is not prepared, because accelerate would then shard the data differently.
    replica, optimizer = accelerator.prepare(model, make_optimizer(model))
    for inputs, targets in make_loader(data):
        optimizer.zero_grad()
        outputs = replica(inputs.to(device, non_blocking=True))
        accelerator.backward(F.cross_entropy(outputs, targets.to(device, non_blocking=True)))
        optimizer.step()
        tick()


def fabric(
    model: nn.Module,
    data: TensorDataset,
    tick: Tick,
    loader_of: Callable[[TensorDataset], DataLoader[Any]] = make_loader,
) -> None:
    from lightning.fabric import Fabric

    accelerator = next(model.parameters()).device.type
    made = Fabric(accelerator=accelerator, strategy="ddp", devices=dist.get_world_size())
    made.launch()
    replica, optimizer = made.setup(model, make_optimizer(model))
    for inputs, targets in made.setup_dataloaders(loader_of(data), use_distributed_sampler=False):
        optimizer.zero_grad()
        made.backward(F.cross_entropy(replica(inputs), targets))
        optimizer.step()
        tick()


def trainer(model: nn.Module, data: TensorDataset, tick: Tick) -> None:
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

    class LightningTicks(lightning.Callback):
        def on_train_batch_end(self, *_: Any) -> None:
            tick()

    made = lightning.Trainer(
        accelerator=next(model.parameters()).device.type,
        strategy="ddp",
        devices=dist.get_world_size(),
        max_epochs=1,
        callbacks=[LightningTicks()],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    made.fit(Module(), make_loader(data))


def ignite(model: nn.Module, data: TensorDataset, tick: Tick) -> None:
    import ignite.distributed as idist
    from ignite.engine import Events, create_supervised_trainer

    device, optimizer = next(model.parameters()).device, make_optimizer(model)
    made = create_supervised_trainer(
        idist.auto_model(model), optimizer, F.cross_entropy, device=device, non_blocking=True
    )
    made.add_event_handler(Events.ITERATION_COMPLETED, tick)
    made.run(make_loader(data), max_epochs=1)


LOOPS: dict[str, Loop] = {
    RAW: raw,
    RAW + AGAIN: raw,
    AT_ONCE: partial(raw, loader_of=loader_at_once),
    OURS: handler,
    ACCELERATE: accelerate,
    FABRIC: fabric,
    FABRIC_AT_ONCE: partial(fabric, loader_of=loader_at_once),
    TRAINER: trainer,
    IGNITE: ignite,
}


def times_on_rank(
    width: int,
    rounds: int,
    names: Sequence[str] = tuple(LOOPS),
    device: str = "cpu",
    check: bool = True,
    seed: int = 0,
) -> dict[str, list[float]]:
    """Return the seconds of a step, by loop and round; with `check`, raise if weights differ."""
    ranks = initialize_ddp(backend=BACKENDS[device], use_distributed=True).world_size
    be_quiet()
    data = make_data(steps_of(rounds), ranks)
    loops = {name: LOOPS[name] for name in names}
    return time_loops(loops, lambda: make_model(width).to(device), data, rounds, seed, check)


def time_loops(
    loops: Mapping[str, Loop],
    make_model: Callable[[], nn.Module],
    data: TensorDataset,
    rounds: int,
    seed: int,
    check: bool,
) -> dict[str, list[float]]:
    """Let the loops take turns, each with a model of its own; return seconds by loop and round.

    `seed` draws the order in which the models are made, and that of the turns. Raise if a loop
    trains without DDP, and with `check` unless all weights end equal.
    """
    drawn = Random(seed).sample(list(loops), len(loops))  # the first may get the best of the memory
    models = {name: make_model() for name in drawn}
    for name, model in models.items():
        require_ddp(name, model)
    times = take_turns(
        {name: partial(loops[name], models[name], data) for name in drawn}, rounds, seed
    )
    if check:
        check_equal({name: models[name] for name in loops}, make_model())
    return {name: times[name] for name in loops}


def require_ddp(name: str, model: nn.Module) -> None:
    """Raise AssertionError in the model's first forward pass unless DDP calls it.

    A library may leave out DDP, as accelerate does for a single process. Its step would then be
    faster than the others for that reason alone.
    """

    def check(*_: object) -> None:
        hook.remove()  # so that no timed step pays for it
        # Private, but torch has no public way to ask, and each library hides its wrapped model.
        assert DDP._get_active_ddp_module(), f"{name} trains without DDP"

    hook = model.register_forward_pre_hook(check)


def be_quiet() -> None:
    """Silence the peers' log messages and warnings."""
    logging.disable(logging.WARNING)  # Lightning sets its loggers' levels when it is imported
    warnings.simplefilter("ignore")  # about the number of the loader's workers


def check_equal(models: Mapping[str, nn.Module], untrained: nn.Module) -> None:
    """Raise AssertionError unless all models have been trained, and to the weights of the first."""
    # On the CPU, because Lightning's Trainer moves its model there at the end.
    flat = {n: nn.utils.parameters_to_vector(m.parameters()).cpu() for n, m in models.items()}
    before = nn.utils.parameters_to_vector(untrained.parameters()).cpu()
    first = next(iter(flat.values()))
    for name, weights in flat.items():
        message = f"{name} has trained another model"
        torch.testing.assert_close(weights, first, rtol=0, atol=0, msg=message)
        assert not torch.equal(weights, before), f"{name} has not trained"
