"""Stage 6 of myddp.py: a block whose weights are sharded, as FSDP2 shards them."""

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from lesson import Exercise, myddp, trial
from lesson.cost_model import PRECISIONS, Link, bytes_sent, gradient_bytes, strategy_bytes_sent
from lesson.partners import open_impatient_group
from lesson.record import recorded
from lesson.trial import WEIGHTS, Prediction, Seen, Way, bytes_held, loss_of, new_gpt
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
    """Return a way that compares logits, because readers may cut their chunks as they like."""
    optimizer = torch.optim.AdamW(model.parameters())

    def step(mine: trial.Batch) -> None:
        loss_of(model, mine).backward()
        average()
        optimizer.step()
        optimizer.zero_grad()

    return Way(step, torch.no_grad()(lambda: model(trial.batch(99)[0])))


def predict(forward: float, backward: float, link: Link) -> Prediction:
    """Predict a step that runs forward twice, and overlaps nothing."""
    sent = strategy_bytes_sent("FSDP2", BLOCKS * BLOCK, 2, PRECISIONS["fp32"])
    sent += bytes_sent(gradient_bytes(WEIGHTS - BLOCKS * BLOCK), 2)
    latencies = BLOCKS * 3 / 2 + OTHERS  # a gather or a scatter is half of an all-reduce
    exposed = latencies * link.latency + sent / link.bandwidth
    return Prediction(2 * forward + backward, exposed, sent)


class Gathered(NamedTuple):
    """On a rank: the whole vector, the chunk's gradient, and the bytes sent for each."""

    whole: Tensor
    gradient: Tensor | None
    sent: tuple[float, float]


def _observe_gather(Gather: Any) -> Gathered:
    open_impatient_group()
    rank = dist.get_rank()
    chunk = (torch.arange(3.0) + 10 * rank).requires_grad_()
    with recorded() as forward:
        whole = Gather.apply(chunk)
    with recorded() as backward:
        try:
            (whole * torch.arange(1.0, len(whole) + 1) * 10**rank).sum().backward()
            gradient = chunk.grad
        except RuntimeError as error:
            if "invalid gradient" not in str(error):
                raise
            gradient = torch.zeros(0)  # its shape is not that of the chunk
    dist.barrier()
    dist.destroy_process_group()
    return Gathered(whole.detach(), gradient, (bytes_sent_in(forward), bytes_sent_in(backward)))


def _judge_gather(ranks: list[Gathered]) -> str | None:
    (whole, gradient, sent), (other, *_) = ranks
    wanted, own = [0.0, 1.0, 2.0, 10.0, 11.0, 12.0], torch.arange(1.0, 4)  # rank 1's is 10 times it
    if not whole.tolist() == other.tolist() == wanted:
        return f"rank 0 has 0, 1, 2 and rank 1 has 10, 11, 12, but you gather {whole.tolist()}"
    if gradient is None:
        return "backward returns no gradient"
    if gradient.shape != (3,):
        return "backward returns the whole gradient. Scatter it: a chunk needs its own part alone"
    for wrong, hint in [(11 * own, "the sum"), (own, "its own"), (11 * own / 4, "divided twice")]:
        if torch.equal(gradient, wrong):
            return f"rank 0's gradient is {hint}, but it should be the mean over the ranks"
    if not torch.equal(gradient, 11 * own / 2):
        return "rank 0's gradient is not the mean of the gradients of chunk 0"
    if sent != (12, 12):
        return (
            f"right, but for 24 bytes in all, forward sends {sent[0]:g} and backward {sent[1]:g}. "
            "Your ring's halves send 12 each, half of an all-reduce"
        )
    return None


class Observed(NamedTuple):
    """On a rank: what the reader's block holds, returns and sends, and three steps."""

    trained: int  # numbers in parameters()
    held: float  # bytes per weight, after a step
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
    block = ShardedBlock(new_gpt().blocks.layers[0])
    with recorded() as forward:
        output = block(x)
    with recorded() as backward:
        output.square().mean().backward()
    units = [bytes_sent_in(log) / (2 * BLOCK) for log in (forward, backward)]
    right = torch.allclose(output, wanted, atol=1e-6)
    gradients = [weight.grad for weight in block.parameters() if weight.grad is not None]
    square = sum(gradient.double().square().sum().item() for gradient in gradients)
    trained = sum(weight.numel() for weight in block.parameters())
    block.zero_grad()
    del gradients, output
    held = (bytes_held() - before) / BLOCK
    own = myddp.load(ShardedBlock=ShardedBlock)
    seen = trial.compare(lambda: way(own), torchs_way)
    dist.destroy_process_group()
    return Observed(trained, held, right, square, own_gradient, units, seen)


def _judge(ranks: list[Observed]) -> str | None:
    trained, held, *_, units, seen = ranks[0]
    own_gradients = torch.stack([rank.own_gradient for rank in ranks]).double()
    # The chunks are parts of one gradient, so its norm tells how it was averaged.
    ratio = sum(rank.square for rank in ranks) / own_gradients.mean(0).square().sum().item()
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
    for wrong, hint in [(0, "missing"), (4, "the sum over the ranks"), (0.25, "divided twice")]:
        if abs(ratio - wrong) < 0.01:
            return f"after backward, the chunk's gradient is {hint}. Gather returns the mean"
    if abs(ratio - 1) > 0.01:
        return "the chunk's gradient is not the mean over the ranks. Gather returns it"
    if held > 2.4:
        return (
            f"after a step, a rank holds {held:.1f} bytes per weight, but its chunk takes 2. "
            "Who keeps the whole weights?"
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


EXERCISES = {
    "Gather": Exercise(_observe_gather, _judge_gather),
    "ShardedBlock": Exercise(_observe, _judge),
}
