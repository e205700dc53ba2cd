"""Time a training step of GPT-2 124M on a GPU: `Handler` against a loop written by hand.

The model has random weights and reads random tokens: 32 rows of 1,024 in a step, in bfloat16, with
clipping and a fused AdamW. Both loops also run with a compiled model. There is one GPU and no DDP.
With little memory the batch is smaller, and if there is too little even for that, so is the model.

The notes give the share of the card's peak: the floating-point operations that the model needs in
a second, divided by those that the data sheet promises for dense bfloat16 matrices. It is known as
model FLOPs utilization (MFU).
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from side_by_side import AGAIN, Row, compare, find
from steps import interval
from tables import Table, goal
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler, TensorDataset
from turns import Tick, Ticks, steps_of, take_turns

from ddp_ref import Handler, run_ranks

ROUNDS = 10
BY_HAND, OURS, COMPILED = "by hand", "Handler", ", compiled"
MOST_OVERHEAD = 0.01  # of the time by hand
# FLOP/s for dense bfloat16 matrices, by torch's name of the card: NVIDIA's data sheets of the A100
# and L40S, and its H100 white paper. The data sheets of the H100 and H200 only give twice as much,
# which holds for sparse matrices. MIG slices and the PCIe and NVL forms of the H100 have others.
PEAKS = {
    "NVIDIA A100-PCIE-40GB": 312e12,
    "NVIDIA A100 80GB PCIe": 312e12,
    "NVIDIA A100-SXM4-40GB": 312e12,
    "NVIDIA A100-SXM4-80GB": 312e12,
    "NVIDIA H100 80GB HBM3": 989.4e12,
    "NVIDIA H200": 989.4e12,
    "NVIDIA L40S": 362.05e12,
}


class Size(NamedTuple):
    name: str
    layers: int
    heads: int
    width: int
    vocabulary: int
    length: int  # tokens of a row
    batch: int  # rows of a step

    @property
    def tokens(self) -> int:
        return self.batch * self.length

    @property
    def flops(self) -> float:
        """Floating-point operations of a step, forward and backward.

        A token needs 6 for each weight that is multiplied, and 12 L C T for attention to T tokens
        in L layers of width C (PaLM, arXiv 2204.02311, appendix B). Causal attention needs half.
        """
        weights = 12 * self.layers * self.width**2 + self.vocabulary * self.width
        attention = 6 * self.layers * self.width * self.length
        return self.tokens * (6 * weights + attention)


GPT2 = Size("GPT-2 124M", 12, 12, 768, 50304, 1024, 32)
TINY = Size("a tiny GPT", 1, 2, 32, 512, 32, 4)
# Five models with their optimizers need 10 GiB, and each row of the batch 0.8 GiB.
FIXED_MEMORY, MEMORY_PER_ROW = 12 * 2**30, 2**30


class Measured(NamedTuple):
    card: str
    size: Size
    times: dict[str, list[float]]
    not_compiled: str  # why; empty if torch.compile works


def measure(rounds: int) -> list[Table]:
    (measured,) = run_ranks(times_on_rank, rounds, nproc=1)
    if measured is None:
        print("left out: no CUDA device is visible")
        return []
    card, size, times, not_compiled = measured
    rows = compare(times, BY_HAND)
    suffixes = [""] if not_compiled else ["", COMPILED]
    notes = [*(against_by_hand(times, suffix) for suffix in suffixes)]
    notes += speeds(rows, size, PEAKS.get(card))
    if not_compiled:
        notes.append(f"Left out: compiled, because torch.compile failed: {not_compiled}")
    if size != GPT2:
        notes.append(f"Smaller than {GPT2.name} with a batch of {GPT2.batch}: too little memory.")
    title = f"a step of {size.name}, {size.batch} x {size.length:,} tokens"
    return [Table(title, rows, [*notes, f"on 1 x {card}"])]


def against_by_hand(times: Mapping[str, list[float]], suffix: str) -> str:
    """Return the goal about `Handler` and the loop by hand, and whether it is reached."""
    base, ours = BY_HAND + suffix, OURS + suffix
    row = find(compare({name: times[name] for name in (base, ours)}, base), ours)
    target = f"'{ours}' at most {MOST_OVERHEAD:.0%} slower than '{base}'"
    return goal(target, interval(row), row.at_most(1 + MOST_OVERHEAD))


def speeds(rows: Sequence[Row], size: Size, peak: float | None) -> list[str]:
    """Return how fast each loop trains, and which share of the peak that is, if it is known."""
    lines = []
    for row in rows:
        seconds = find(rows, BY_HAND).seconds * row.ratio
        share = f", {size.flops / seconds / peak:.1%} of {peak / 1e12:g} TFLOP/s" if peak else ""
        lines.append(f"{row.name}: {round(size.tokens / seconds, -2):,.0f} tokens a second{share}")
    return lines


def times_on_rank(rounds: int) -> Measured | None:
    """Return the seconds of a step, by loop and round; None if there is no GPU."""
    if not torch.cuda.is_available():
        return None
    torch.set_float32_matmul_precision("high")  # else the compiler warns that it is not set
    size = size_for(torch.cuda.mem_get_info()[0])
    loops = {BY_HAND: by_hand, BY_HAND + AGAIN: by_hand, OURS: with_handler}
    not_compiled = compile_error()
    if not not_compiled:
        loops |= {BY_HAND + COMPILED: by_hand, OURS + COMPILED: with_handler}
    models = {name: make_model(size) for name in loops}
    for name, model in models.items():
        if name.endswith(COMPILED):
            model.compile()
    data = make_data(size, steps_of(rounds))
    turns = {name: partial(loop, models[name], size, data) for name, loop in loops.items()}
    times = take_turns(turns, rounds, seed=0)
    return Measured(torch.cuda.get_device_name(), size, times, not_compiled)


def size_for(memory: int) -> Size:
    """Return the largest size that fits into that many bytes."""
    for batch in (32, 16, 8):
        if FIXED_MEMORY + batch * MEMORY_PER_ROW <= memory:
            return GPT2._replace(batch=batch)
    return TINY


def compile_error() -> str:
    """Return why torch.compile does not work here; it needs Triton and a C compiler."""
    try:
        torch.compile(lambda x: x + 1)(torch.ones(8, device="cuda"))
    except RuntimeError as error:
        return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
    return ""


class Block(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        width, self.heads = size.width, size.heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # (batch, length, width), both
        heads = self.qkv(self.norm_1(x)).unflatten(2, (3, self.heads, -1))
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm_2(x)), approximate="tanh"))


class GPT(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.tokens = nn.Embedding(size.vocabulary, size.width)
        self.places = nn.Embedding(size.length, size.width)
        self.blocks = nn.Sequential(*(Block(size) for _ in range(size.layers)))
        self.norm = nn.LayerNorm(size.width)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:  # (batch, length) -> logits
        places = torch.arange(ids.shape[1], device=ids.device)
        x = self.blocks(self.tokens(ids) + self.places(places))
        return F.linear(self.norm(x), self.tokens.weight)  # input and output share weights


def loss_fn(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(outputs.flatten(0, 1), targets.flatten())


def make_model(size: Size) -> GPT:
    torch.manual_seed(0)
    return GPT(size).cuda()


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), 6e-4, (0.9, 0.95), weight_decay=0.1, fused=True)


def make_data(size: Size, steps: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    rows = steps * size.batch, size.length + 1
    ids = torch.randint(size.vocabulary, rows, generator=generator)
    return TensorDataset(ids[:, :-1], ids[:, 1:])


def by_hand(model: nn.Module, size: Size, data: TensorDataset, tick: Tick) -> None:
    optimizer = make_optimizer(model)
    # Look up a batch at once and pin it, as Handler does.
    rows = BatchSampler(SequentialSampler(data), size.batch, drop_last=False)
    for batch in DataLoader(data, batch_size=None, sampler=rows, pin_memory=True):
        inputs, targets = (tensor.to("cuda", non_blocking=True) for tensor in batch)
        optimizer.zero_grad()
        with torch.autocast("cuda", torch.bfloat16):
            loss = loss_fn(model(inputs), targets)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        tick()


def with_handler(model: nn.Module, size: Size, data: TensorDataset, tick: Tick) -> None:
    handler = Handler(
        model,
        make_optimizer(model),
        loss_fn,
        callbacks=[Ticks(tick)],
        clip_norm=1.0,
        precision="bf16",
        device="cuda",
    )
    handler.set_train_loader(data, size.batch, shuffle=False)
    handler.train(1)
