"""A training step of the small GPT, with `Handler` and with a hand-written loop.

The model, text and optimizer are those of scripts/char_gpt.py. Both loops look up a batch at once.
The benchmark fails unless both end with the same weights, bit for bit. We start the two ranks 12
times.
"""

import runpy
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace

import torch
from page import ROOT
from side_by_side import AGAIN, compare
from steps import BACKENDS, OURS, RAW, loader_at_once, time_loops
from tables import Table
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import TensorDataset
from turns import Tick, Ticks, in_launches, steps_of

from ddp_ref import Handler, initialize_ddp

ROUNDS, RANKS, LAUNCHES = 300, 2, 12
SCRIPT = ROOT / "scripts" / "char_gpt.py"
BATCH, BLOCK = {"cpu": 8, "cuda": 64}, 64  # rows of a rank, characters of a row


def measure(rounds: int) -> list[Table]:
    times, part = in_launches(times_on_rank, rounds=rounds, launches=LAUNCHES, nproc=RANKS)
    return [Table("a step of the small GPT", compare(times, RAW, part), [])]


def times_on_rank(
    rounds: int, device: str = "cpu", check: bool = True, seed: int = 0
) -> dict[str, list[float]]:
    """Return the seconds of a step, by loop and round; with `check`, raise if weights differ."""
    ranks = initialize_ddp(backend=BACKENDS[device], use_distributed=True).world_size
    char_gpt = SimpleNamespace(**runpy.run_path(str(SCRIPT)))
    text = char_gpt.read_text()
    vocabulary = "".join(sorted(set(text)))
    rows = char_gpt.windows(char_gpt.encode(text, vocabulary), BLOCK)
    needed = steps_of(rounds) * BATCH[device] * ranks
    data = char_gpt.pairs(rows.repeat(-(-needed // len(rows)), 1)[:needed])

    def make_model() -> nn.Module:
        torch.manual_seed(0)
        return char_gpt.GPT(vocabulary, 4, 4, 64, BLOCK).to(device)

    raw, ours = partial(by_hand, char_gpt), partial(with_handler, char_gpt)
    loops = {RAW: raw, RAW + AGAIN: raw, OURS: ours}
    return time_loops(loops, make_model, data, rounds, seed, check)


def by_hand(char_gpt: SimpleNamespace, model: nn.Module, data: TensorDataset, tick: Tick) -> None:
    device = next(model.parameters()).device
    replica, optimizer = DDP(model), make_optimizer(model)
    schedule = make_schedule(char_gpt, optimizer)
    cuda = device.type == "cuda"
    precision = torch.autocast("cuda", torch.bfloat16) if cuda else nullcontext()
    for inputs, targets in loader_at_once(data, BATCH[device.type]):
        optimizer.zero_grad()
        with precision:
            outputs = replica(inputs.to(device, non_blocking=True))  # as Handler does
            targets = targets.to(device, non_blocking=True)
            loss = char_gpt.next_character_loss(outputs, targets)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        tick()


def with_handler(
    char_gpt: SimpleNamespace, model: nn.Module, data: TensorDataset, tick: Tick
) -> None:
    device, optimizer = next(model.parameters()).device, make_optimizer(model)

    handler = Handler(
        model,
        optimizer,
        char_gpt.next_character_loss,
        scheduler=(make_schedule(char_gpt, optimizer), "step"),
        callbacks=[Ticks(tick)],
        clip_norm=1.0,
        precision="bf16" if device.type == "cuda" else "fp32",
        device=device,
        use_distributed=True,
    )
    handler.set_train_loader(data, BATCH[device.type])
    handler.train(1)


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), 8e-3, (0.9, 0.99), weight_decay=0.1, fused=True)


def make_schedule(
    char_gpt: SimpleNamespace, optimizer: torch.optim.Optimizer
) -> torch.optim.lr_scheduler.LambdaLR:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: char_gpt.rate(step, 1000))
