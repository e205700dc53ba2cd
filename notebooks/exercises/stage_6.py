"""Stage 6 of myddp.py: a block whose weights are sharded, as FSDP2 shards them."""

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from lesson import Exercise, trial
from lesson.cost_model import PRECISIONS, Link, bytes_sent, gradient_bytes, strategy_bytes_sent
from lesson.partners import open_impatient_group
from lesson.record import recorded
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

BLOCK, BLOCKS, OTHERS = 49_280, 2, 3  # weights of a block, blocks, and other tensors of the GPT


class Layers(nn.ModuleList):
    """The GPT's blocks one after another; PyTorch's TransformerEncoder looks into its layers."""

    def forward(self, x: Tensor, mask: Tensor, is_causal: bool) -> Tensor:
        for layer in self:
            x = layer(x, src_mask=mask, is_causal=is_causal)
        return x


def way(own: Any) -> trial.Way:
    """Train with the reader's blocks. Embeddings and head are whole, and averaged."""
    model: Any = trial.new_gpt()
    model.blocks = Layers([own.ShardedBlock(block) for block in model.blocks.layers])
    others = nn.ModuleList([model.characters, model.places, model.head])
    return _by_logits(model, lambda: own.average_gradients(others))


def torchs_way() -> trial.Way:
    model: Any = trial.new_gpt()
    for block in [*model.blocks.layers, model]:
        fully_shard(block)
    return _by_logits(model, lambda: None)


def _by_logits(model: nn.Module, finish: Any) -> trial.Way:
    """Return a way that compares logits, because readers may cut their chunks as they like."""
    way = trial.with_steps(model, finish)
    return way._replace(weights=torch.no_grad()(lambda: model(trial.batch(99)[0])))


def predict(forward: float, backward: float, link: Link) -> trial.Prediction:
    """Predict a step that runs forward twice, and overlaps nothing."""
    sent = strategy_bytes_sent("FSDP2", BLOCKS * BLOCK, 2, PRECISIONS["fp32"])
    sent += bytes_sent(gradient_bytes(trial.WEIGHTS - BLOCKS * BLOCK), 2)
    latencies = BLOCKS * 3 / 2 + OTHERS  # a gather or a scatter is half of an all-reduce
    exposed = latencies * link.latency + sent / link.bandwidth
    return trial.Prediction(2 * forward + backward, exposed, sent)


class Gathered(NamedTuple):
    """On a rank: the whole vector, gradients, and the units sent."""

    whole: Tensor
    own: Tensor  # the whole gradient, as backward got it
    unchanged: bool
    gradient: Any  # of the chunk
    units: list[float]


def _observe_gather(Gather: Any) -> Gathered:
    open_impatient_group()
    rank = dist.get_rank()
    chunk = (torch.arange(3.0) + 10 * rank).requires_grad_()
    own = torch.arange(1.0, 1 + 3 * dist.get_world_size()) * 10**rank
    with recorded() as forward:
        whole = Gather.apply(chunk)
    with recorded() as backward:
        whole.backward(given := own.clone())
    dist.barrier()
    units = [trial.units_sent(log, len(own)) for log in (forward, backward)]
    return Gathered(whole.detach(), own, torch.equal(own, given), chunk.grad, units)


def _judge_gather(ranks: list[Gathered]) -> str | None:
    wanted = [0.0, 1.0, 2.0, 10.0, 11.0, 12.0, 20.0, 21.0, 22.0]
    for whole, *_ in ranks:
        if whole.tolist() != wanted:
            return f"the chunks are 0, 1, 2 and 10, 11, 12 and ..., but you gather {whole.tolist()}"
    own = torch.stack([rank.own for rank in ranks]).tensor_split(len(ranks), dim=1)
    if hint := trial.judge_mean([rank.gradient for rank in ranks], own):
        return f"after backward, {hint}"
    if not all(rank.unchanged for rank in ranks):
        return "right, but backward has changed `gradient`, which belongs to autograd: clone it"
    return trial.judge_units(ranks[0].units, [1, 1])


class Observed(NamedTuple):
    """On a rank: what the reader's block holds, returns and sends."""

    trained: int  # numbers in parameters()
    held: float  # bytes per weight, after a step
    between: float  # the same, between forward and backward
    right: bool  # the output
    square: float  # of the gradients
    own_gradient: Tensor  # of the whole block, before an average
    units: list[float]  # sent in forward and in backward


def _observe(ShardedBlock: Any) -> Observed:
    open_impatient_group()
    whole: Any = trial.new_gpt().blocks.layers[0]
    x = torch.randn(2, 8, 64, generator=torch.Generator().manual_seed(dist.get_rank()))
    (wanted := whole(x)).square().mean().backward()
    own_gradient, before = trial.gradient_of(whole), trial.bytes_held()
    block = ShardedBlock(trial.new_gpt().blocks.layers[0])
    with recorded() as forward:
        output = block(x)
    between = (trial.bytes_held() - before) / BLOCK
    with recorded() as backward:
        output.square().mean().backward()
    units = [trial.units_sent(log, BLOCK) for log in (forward, backward)]
    right = torch.allclose(output, wanted, atol=1e-6)
    square = trial.gradient_of(block).double().square().sum().item()
    trained = sum(weight.numel() for weight in block.parameters())
    block.zero_grad()
    del output
    held = (trial.bytes_held() - before) / BLOCK
    dist.barrier()
    return Observed(trained, held, between, right, square, own_gradient, units)


def _judge(ranks: list[Observed]) -> str | None:
    trained, held, *_, units = ranks[0]
    n, own = len(ranks), torch.stack([rank.own_gradient for rank in ranks]).double()
    # The chunks are parts of one gradient, so its norm tells how it was averaged.
    ratio = sum(rank.square for rank in ranks) / own.mean(0).square().sum().item()
    if trained > 0.5 * BLOCK:
        return (
            f"parameters() has {trained} numbers on rank 0, and the block {BLOCK}: "
            "only this rank's chunk may be an nn.Parameter"
        )
    if not all(rank.right for rank in ranks):
        return (
            "the output is not that of the whole block. Does every rank keep the chunk of its own "
            "rank, and does each weight get back its own numbers and shape?"
        )
    for wrong, what in [(0, "missing"), (n**2, "the sum"), (1 / n**2, "divided twice")]:
        if abs(ratio - wrong) < 0.01:
            return f"after backward, the chunk's gradient is {what}. Gather returns the mean"
    if abs(ratio - 1) > 0.01:
        return "the chunk's gradient is not the mean over the ranks. Gather returns it"
    if held > 5 / n:
        return (
            f"after a step, a rank holds {held:.1f} bytes per weight, but its chunk takes 4/{n}. "
            "Who keeps the whole weights?"
        )
    if hint := trial.judge_units(units, [1, 2]):
        return f"{hint}. FSDP2 gathers again in backward, and keeps nothing whole"
    if max(rank.between for rank in ranks) > 5 / n:
        return (
            f"between forward and backward, a rank holds {ranks[0].between:.1f} bytes per weight, "
            f"but its chunk takes 4/{n}. Keep nothing whole, neither in ctx nor in the block"
        )
    return None


EXERCISES = {
    "Gather": Exercise(_observe_gather, _judge_gather, nproc=3),
    "ShardedBlock": Exercise(
        _observe, _judge, nproc=3, train=trial.training("ShardedBlock", way, torchs_way)
    ),
}
