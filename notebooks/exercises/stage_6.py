"""Stage 6 of myddp.py: a block whose weights are sharded, as FSDP2 shards them."""

import gc
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from lesson import Exercise, myddp
from lesson.cost_model import PRECISIONS, Link, bytes_sent, gradient_bytes, strategy_bytes_sent
from lesson.partners import open_impatient_group
from lesson.record import recorded
from lesson.trial import (
    WEIGHTS,
    Batch,
    Prediction,
    Seen,
    Way,
    batch,
    bytes_held,
    compare,
    loss_of,
    new_gpt,
)
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from .stage_5 import bytes_sent_in

BLOCK, BLOCKS, OTHERS = 49_280, 2, 3  # weights of a block, blocks, and other tensors of the GPT


class Layers(nn.ModuleList):
    """The GPT's blocks one after another; PyTorch's TransformerEncoder looks into its layers."""

    def forward(self, x: Tensor, mask: Tensor, is_causal: bool) -> Tensor:
        for layer in self:
            x = layer(x, src_mask=mask, is_causal=is_causal)
        return x


def way(own: Any) -> Way:
    """Train with the reader's blocks. Embeddings and head are whole, and averaged."""
    model: Any = new_gpt()
    model.blocks = Layers([own.ShardedBlock(block) for block in model.blocks.layers])
    others = nn.ModuleList([model.characters, model.places, model.head])
    return _trained(model, lambda: own.average_gradients(others))


def torchs_way() -> Way:
    model: Any = new_gpt()
    for block in [*model.blocks.layers, model]:
        fully_shard(block)
    return _trained(model, lambda: None)


def _trained(model: nn.Module, average: Any) -> Way:
    """Return a way that compares logits, as weights that are sharded are hard to compare."""
    optimizer = torch.optim.AdamW(model.parameters())

    def step(mine: Batch) -> None:
        loss_of(model, mine).backward()
        average()
        optimizer.step()
        optimizer.zero_grad()

    @torch.no_grad()
    def logits() -> Tensor:
        return model(batch(99)[0])

    return Way(step, logits)


def predict(forward: float, backward: float, link: Link) -> Prediction:
    """Predict that blocks compute forward twice, and nothing overlaps."""
    sharded = BLOCKS * BLOCK
    sent = strategy_bytes_sent("FSDP2", sharded, 2, PRECISIONS["fp32"])
    sent += bytes_sent(gradient_bytes(WEIGHTS - sharded), 2)
    latencies = BLOCKS * 3 / 2 + OTHERS  # a gather or a scatter is half of an all-reduce
    seconds = latencies * link.latency + sent / link.bandwidth
    return Prediction(2 * forward + backward, seconds, sent)


class Gathered(NamedTuple):
    """On a rank: the whole vector, the shard's gradient, and the bytes sent for each."""

    whole: Tensor
    gradient: Tensor | None
    sent: tuple[float, float]


def _gather(Gather: Any) -> Gathered:
    open_impatient_group()
    shard = (torch.arange(3.0) + 10 * dist.get_rank()).requires_grad_()
    with recorded() as forward:
        whole = Gather.apply(shard)
    with recorded() as backward:
        try:
            (whole * torch.arange(1.0, 7) * 10 ** dist.get_rank()).sum().backward()
        except RuntimeError as error:
            if "invalid gradient" not in str(error):
                raise
            shard.grad = torch.zeros(0)
    dist.barrier()
    dist.destroy_process_group()
    return Gathered(whole.detach(), shard.grad, (bytes_sent_in(forward), bytes_sent_in(backward)))


def _judge_gather(ranks: list[Gathered]) -> str | None:
    (whole, gradient, sent), (other, _, _) = ranks
    wanted, total = torch.tensor([0.0, 1, 2, 10, 11, 12]), 11 * torch.arange(1.0, 4)
    if len(whole) != 6:
        return f"forward returns {len(whole)} numbers, but the two shards have 6 together"
    if not torch.equal(whole, wanted) or not torch.equal(other, wanted):
        return f"rank 0 has 0, 1, 2 and rank 1 has 10, 11, 12, but you gather {whole.tolist()}"
    if gradient is None:
        return "backward returns no gradient"
    if gradient.shape != (3,):
        return "backward returns the whole gradient. Scatter it: a shard needs its own part alone"
    hints = [(total, "the sum"), (total / 11, "its own"), (total / 4, "divided twice")]
    for wrong, hint in hints:
        if torch.equal(gradient, wrong):
            return f"rank 0's gradient is {hint}, but it should be the mean over the ranks"
    if not torch.equal(gradient, total / 2):
        return "rank 0's gradient is not the mean of the gradients of shard 0"
    if sent != (12, 12):
        return (
            f"right, but for 24 bytes in all, forward sends {sent[0]:g} and backward {sent[1]:g}. "
            "Your ring's halves send 12 each, half of an all-reduce"
        )
    return None


class Observed(NamedTuple):
    """On a rank: what the reader's block holds, returns and sends, and three steps."""

    trained: int  # numbers in parameters()
    held: float  # bytes after a step
    right: bool  # the output
    square: float  # of the gradients
    own_gradient: Tensor  # of the whole block, before an average
    units: list[float]  # sent in forward and in backward
    seen: Seen


def _observe(ShardedBlock: Any) -> Observed:
    open_impatient_group()
    whole: Any = new_gpt().blocks.layers[0]
    x = torch.randn(2, 8, 64, generator=torch.Generator().manual_seed(dist.get_rank()))
    (wanted := whole(x)).square().mean().backward()
    own_gradient = torch.cat([weight.grad.flatten() for weight in whole.parameters()])
    before = bytes_held()
    block, units = ShardedBlock(new_gpt().blocks.layers[0]), []
    with recorded() as log:
        output = block(x)
    units.append(bytes_sent_in(log) / (2 * BLOCK))
    with recorded() as log:
        output.square().mean().backward()
    units.append(bytes_sent_in(log) / (2 * BLOCK))
    right = torch.allclose(output, wanted, atol=1e-6)
    gradients = [weight.grad for weight in block.parameters() if weight.grad is not None]
    square = sum(gradient.double().square().sum().item() for gradient in gradients)
    trained = sum(weight.numel() for weight in block.parameters())
    block.zero_grad()
    del gradients, output, log
    gc.collect()
    held = bytes_held() - before
    own = myddp.load(ShardedBlock=ShardedBlock)
    seen = compare(lambda: way(own), torchs_way)
    dist.destroy_process_group()
    return Observed(trained, held, right, square, own_gradient, units, seen)


def _judge(ranks: list[Observed]) -> str | None:
    trained, held, units, seen = ranks[0].trained, ranks[0].held, ranks[0].units, ranks[0].seen
    if trained > 0.6 * BLOCK:
        return (
            f"parameters() has {trained} numbers on rank 0, and the block {BLOCK}: "
            "only this rank's chunk may be an nn.Parameter"
        )
    if not all(rank.right for rank in ranks):
        return (
            "the output is not that of the whole block. Does every rank keep the chunk of its own "
            "rank, and does each weight get back its own numbers and shape?"
        )
    square, mean = (sum(rank.square for rank in ranks), _mean_square(ranks))
    if not square:
        return "the chunk has no gradient after backward: forward must go through Gather"
    for factor, what in [(2, "the sum over the ranks, not the mean"), (0.5, "divided twice")]:
        if abs(square / mean - factor**2) < 0.01:
            return f"the chunks' gradient is {what}"
    if abs(square / mean - 1) > 0.01:
        return "the chunks' gradient is not the mean over the ranks"
    if held > 2.4 * BLOCK:
        return (
            f"after a step, a rank holds {held / BLOCK:.1f} bytes per weight, but a chunk takes 2. "
            "Where do the whole weights live on?"
        )
    if abs(units[0] - 1) > 0.05 or abs(units[1] - 2) > 0.05:
        kept = "The whole weights are kept from forward to backward: drop them, and gather again. "
        return (
            f"right, but forward sends {units[0]:.1f} units and backward {units[1]:.1f}. "
            + kept * (units[1] < 1.5)
            + "FSDP2 sends 1 and 2: a gather, then a gather and a reduce-scatter"
        )
    same = all(map(torch.equal, seen.own, seen.torchs))
    return None if same else "one block is right, but the training differs from FSDP2's"


def _mean_square(ranks: list[Observed]) -> float:
    mean = torch.stack([rank.own_gradient for rank in ranks]).double().mean(0)
    return mean.square().sum().item()


EXERCISES = {
    "Gather": Exercise(_gather, _judge_gather),
    "ShardedBlock": Exercise(_observe, _judge),
}
