"""A training step of `Handler`, accelerate, Lightning and ignite, compared with a raw DDP loop.

All of them train the same model on the same data, in the same order and in the same two processes:
two ranks with one thread each on the CPU, with batches of 32 from a `TensorDataset`. Each loop has
its own copy of the model. The benchmark fails unless all copies end with the same weights as the
raw loop's, bit for bit. accelerate gets the raw loop's loader, because a loader that it prepares
would shard the data differently. The two models are sized for steps of a few milliseconds.

The loops take turns of ten steps in the same two processes. The memory addresses that a process
gets can make one loop faster and another slower for as long as the process lives. So we start the
processes twelve times. If the control's interval then still extends more than 2 % from 1, we start
them up to twelve more times. The intervals are bootstrapped over these launches. Because we stop as
soon as the control's interval is narrow enough, it may be a little too narrow.

The loops do not all do the same work. `Handler` looks up the samples of a batch in one call. The
loader that the others use looks them up one by one. So there is also a raw loop, and a Fabric loop,
that look up batches at once: compare `Handler` with that raw loop to see its own overhead.
`Handler` also records the loss, and all ranks share it every ten steps while the next step runs.
Lightning's and ignite's loops do what they do by default besides training. Logging, progress bars
and checkpoints are off.
"""

import logging
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from random import Random
from typing import Any

import torch
import torch.nn.functional as F
from side_by_side import AGAIN, Row, compare, find, spread
from tables import Table, goal
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import BatchSampler, DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler
from turns import Tick, Ticks, steps_of, take_turns

from ddp_ref import Handler, initialize_ddp, run_ranks

ROUNDS, RANKS, LAUNCHES = 600, 2, 12
MOST = 2  # times the launches: more are made until the control is narrow enough, but no more
BATCH, FEATURES, CLASSES = 32, 16, 10
TOLERANCE = {"cpu": (0, 0), "cuda": (1e-2, 1e-3)}  # of weights: relative, absolute
WIDTHS = {"a small step (five layers, 64 wide)": 64, "a larger step (five layers, 384 wide)": 384}
RAW, AT_ONCE, OURS = "raw DDP", "raw DDP, batches looked up at once", "Handler"
FABRIC, FABRIC_AT_ONCE = "Lightning Fabric", "Lightning Fabric, batches looked up at once"
NEAR = 0.02  # of raw DDP's time
NEAR_OWN_LOADER = {64: 0.05, 384: 0.02}  # by width, of the raw loop's time with the same loader


def measure(rounds: int) -> list[Table]:
    return [measure_size(title, width, rounds) for title, width in WIDTHS.items()]


def measure_size(title: str, width: int, rounds: int) -> Table:
    """Return the table of `rounds` rounds, and of more while the control is too wide.

    When it stops depends on the control alone, and so does not favour `Handler` or a peer.
    """
    times: dict[str, list[float]] = {name: [] for name in WAYS}
    launches = min(LAUNCHES, rounds)
    part = -(-rounds // launches)
    for seed in range(MOST * launches):
        for name, found in run_ranks(times_on_rank, width, part, seed=seed, nproc=RANKS)[0].items():
            times[name] += found
        if seed + 1 >= launches and spread(rows := compare(times, RAW, part)) < NEAR:
            break
    taken = f"Measured in {len(times[RAW]) // part} launches of {part:,} rounds each."
    limit = NEAR_OWN_LOADER[width]
    return Table(title, rows, [taken, *against_raw(rows), against_own_loader(times, part, limit)])


def against_raw(rows: list[Row]) -> list[str]:
    """Return whether `Handler` is near enough to raw DDP, and no other library is faster.

    If the noise is as large as the goal, it could hide a miss, so then no goal counts as reached.
    """
    noise = spread(rows)
    quiet = noise < NEAR
    ours, peers = find(rows, OURS), peers_of(rows)
    near = f"Handler at most {NEAR:.0%} slower than raw DDP"
    is_near = ours.at_most(1 + NEAR)
    goals = [goal(near, interval(ours), None if is_near and not quiet else is_near)]
    if peers:
        faster = ", ".join(row.name for row in peers if row.ratio < ours.ratio - noise)
        target = "no other library with its usual loader faster than Handler by more than the noise"
        reached = False if faster else True if quiet else None
        goals.append(goal(target, faster or "none measurably faster", reached))
    return goals


def against_own_loader(times: Mapping[str, list[float]], part: int, limit: float) -> str:
    """Return how much longer `Handler` takes than a raw loop that looks up its batches alike."""
    row = find(compare({name: times[name] for name in (AT_ONCE, OURS)}, AT_ONCE, part), OURS)
    target = f"Handler at most {limit:.0%} slower than {AT_ONCE}"
    return goal(target, interval(row), row.at_most(1 + limit))


def interval(row: Row) -> str:
    return f"{row.ratio - 1:+.1%}, {row.low - 1:+.1%} to {row.high - 1:+.1%}"


def peers_of(rows: list[Row]) -> list[Row]:
    """Return the rows of the peers, each with the loader that it would use."""
    others = RAW, RAW + AGAIN, AT_ONCE, OURS, FABRIC_AT_ONCE
    return [row for row in rows if row.name not in others]


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
    """Return a loader of this rank's batches, in the order that `Handler` has as well."""
    return DataLoader(data, batch, sampler=DistributedSampler(data))


def loader_at_once(data: TensorDataset, batch: int = BATCH) -> DataLoader[Any]:
    """Return a loader of the same batches, which are looked up as one, as `Handler` does."""
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

    accelerator = Accelerator(cpu=True)
    # The loader is not prepared: it would shard the data its own way, and be another job.
    replica, optimizer = accelerator.prepare(model, make_optimizer(model))
    for inputs, targets in make_loader(data):
        optimizer.zero_grad()
        accelerator.backward(F.cross_entropy(replica(inputs), targets))
        optimizer.step()
        tick()


def fabric(
    model: nn.Module,
    data: TensorDataset,
    tick: Tick,
    loader_of: Callable[[TensorDataset], DataLoader[Any]] = make_loader,
) -> None:
    from lightning.fabric import Fabric

    made = Fabric(accelerator="cpu", strategy="ddp", devices=RANKS)
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
        accelerator="cpu",
        strategy="ddp",
        devices=RANKS,
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

    optimizer = make_optimizer(model)
    made = create_supervised_trainer(idist.auto_model(model), optimizer, F.cross_entropy)
    made.add_event_handler(Events.ITERATION_COMPLETED, tick)
    made.run(make_loader(data), max_epochs=1)


WAYS: dict[str, Callable[[nn.Module, TensorDataset, Tick], None]] = {
    RAW: raw,
    RAW + AGAIN: raw,
    AT_ONCE: partial(raw, loader_of=loader_at_once),
    OURS: handler,
    "accelerate": accelerate,
    FABRIC: fabric,
    FABRIC_AT_ONCE: partial(fabric, loader_of=loader_at_once),
    "Lightning Trainer": trainer,
    "ignite": ignite,
}


def times_on_rank(
    width: int,
    rounds: int,
    names: Sequence[str] = tuple(WAYS),
    device: str = "cpu",
    backend: str = "gloo",
    seed: int = 0,
) -> dict[str, list[float]]:
    """Return the seconds of a step, by way and round; all weights are equal, or it raises.

    `seed` draws the order in which the ways are made, and that of the turns.
    """
    ranks = initialize_ddp(backend=backend, use_distributed=True).world_size
    be_quiet()
    data = make_data(steps_of(rounds), ranks)
    drawn = Random(seed).sample(names, len(names))  # the first may get the best of the memory
    models = {name: make_model(width).to(device) for name in drawn}
    ways = {name: partial(WAYS[name], models[name], data) for name in drawn}
    times = take_turns(ways, rounds, seed)
    check_equal(models, make_model(width).to(device), *TOLERANCE[device])
    return {name: times[name] for name in names}


def be_quiet() -> None:
    """Leave out what the peers tell of themselves."""
    for name in ("lightning.pytorch", "lightning.fabric", "ignite"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.simplefilter("ignore")  # about the number of the loader's workers


def check_equal(
    models: Mapping[str, nn.Module], untrained: nn.Module, rtol: float = 0, atol: float = 0
) -> None:
    """Raise AssertionError unless all models have been trained, and to the weights of the first."""
    flat = {n: nn.utils.parameters_to_vector(m.parameters()) for n, m in models.items()}
    before = nn.utils.parameters_to_vector(untrained.parameters())
    first = next(iter(flat.values()))
    for name, weights in flat.items():
        message = f"{name} has trained another model"
        torch.testing.assert_close(weights, first, rtol=rtol, atol=atol, msg=message)
        assert not torch.equal(weights, before), f"{name} has not trained"
