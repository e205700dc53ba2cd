"""A training step of the small GPT, with `Handler` and with a hand-written loop.

The model and its schedule are those of scripts/char_gpt.py, on random text. Both loops look up a
batch at once. The benchmark fails unless both end with the same weights, bit for bit. We start the
two ranks 12 times.
"""

import runpy
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from page import ROOT
from side_by_side import AGAIN, Times, compare
from steps import BACKENDS, OURS, RAW, loader_at_once, time_loops
from tables import Table
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import TensorDataset
from turns import Tick, Ticks, in_launches, steps_of

from ddp_ref import Handler, initialize_ddp

ROUNDS, LAUNCHES = 300, 12
CHAR_GPT = SimpleNamespace(**runpy.run_path(str(ROOT / "scripts" / "char_gpt.py")))


class Size(NamedTuple):
    batch: int  # rows of a rank
    length: int = 64  # characters of a row
    vocabulary: int = 96
    layers: int = 4
    heads: int = 4
    width: int = 64


def measure(rounds: int) -> list[Table]:
    times, part = in_launches(times_on_rank, Size(batch=8), rounds=rounds, launches=LAUNCHES)
    return [Table("a step of the small GPT", compare(times, part))]


def times_on_rank(
    size: Size, rounds: int, device: str = "cpu", check: bool = True, seed: int = 0
) -> Times:
    """Return the seconds of a step, by loop and round; with `check`, raise if weights differ."""
    ranks = initialize_ddp(backend=BACKENDS[device], use_distributed=True).world_size
    generator = torch.Generator().manual_seed(0)
    rows = steps_of(rounds) * size.batch * ranks, size.length + 1
    data = CHAR_GPT.pairs(torch.randint(size.vocabulary, rows, generator=generator))

    def make_model() -> nn.Module:
        torch.manual_seed(0)
        sizes = size.layers, size.heads, size.width, size.length
        return CHAR_GPT.GPT("x" * size.vocabulary, *sizes).to(device)

    raw, ours = partial(by_hand, size.batch), partial(with_handler, size.batch)
    loops = {RAW: raw, RAW + AGAIN: raw, OURS: ours}
    return time_loops(loops, make_model, data, rounds, seed, check)


def by_hand(batch: int, model: nn.Module, data: TensorDataset, tick: Tick) -> None:
    device = next(model.parameters()).device
    replica, (optimizer, schedule) = DDP(model), make_optimizer(model)
    cuda = device.type == "cuda"
    precision = torch.autocast("cuda", torch.bfloat16) if cuda else nullcontext()
    for inputs, targets in loader_at_once(data, batch):
        optimizer.zero_grad()
        with precision:
            outputs = replica(inputs.to(device, non_blocking=True))  # as Handler does
            targets = targets.to(device, non_blocking=True)
            loss = CHAR_GPT.next_character_loss(outputs, targets)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        tick()


def with_handler(batch: int, model: nn.Module, data: TensorDataset, tick: Tick) -> None:
    device, (optimizer, schedule) = next(model.parameters()).device, make_optimizer(model)
    handler = Handler(
        model,
        optimizer,
        CHAR_GPT.next_character_loss,
        scheduler=(schedule, "step"),
        callbacks=[Ticks(tick)],
        clip_norm=1.0,
        precision="bf16" if device.type == "cuda" else "fp32",
        device=device,
        use_distributed=True,
        log=lambda _: None,
    )
    handler.set_train_loader(data, batch)
    handler.train(1)


def make_optimizer(model: nn.Module) -> tuple[torch.optim.Optimizer, Any]:
    weights = model.parameters()
    optimizer = torch.optim.AdamW(weights, 1e-3, (0.9, 0.99), weight_decay=0.1, fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: CHAR_GPT.rate(n, 1000))
    return optimizer, schedule
