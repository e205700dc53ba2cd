"""Typical wrong answers to stage 6 of myddp.py, and words of the hint that each must get."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from lesson import myddp
from torch import nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

own = myddp.load()


class RightGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, shard):
        ring = own.Ring()
        chunks = [torch.empty_like(shard) for _ in range(ring.world_size)]
        chunks[ring.rank].copy_(shard)
        own.all_gather(ring, chunks)
        return torch.cat(chunks)

    @staticmethod
    def backward(ctx, gradient):
        chunks = gradient.clone().tensor_split(dist.get_world_size())
        own.reduce_scatter(own.Ring(), chunks)
        return chunks[dist.get_rank()] / dist.get_world_size()


class Sums(RightGather):
    @staticmethod
    def backward(ctx, gradient):
        return RightGather.backward(ctx, gradient) * dist.get_world_size()


class ScattersOnRank0Alone(RightGather):
    @staticmethod
    def backward(ctx, gradient):
        return RightGather.backward(ctx, gradient) if dist.get_rank() == 0 else gradient[:3]


class ChangesItsGradient(RightGather):
    @staticmethod
    def backward(ctx, gradient):
        chunks = gradient.tensor_split(dist.get_world_size())
        own.reduce_scatter(own.Ring(), chunks)
        return chunks[dist.get_rank()] / dist.get_world_size()


class RightBlock(nn.Module):
    """The solution, in parts that a mistake can replace."""

    def __init__(self, block):
        super().__init__()
        whole = nn.utils.parameters_to_vector(block.parameters()).detach()
        whole = F.pad(whole, (0, -len(whole) % dist.get_world_size()))
        chunk = whole.tensor_split(dist.get_world_size())[dist.get_rank()]
        self.shard = nn.Parameter(chunk.clone())
        self.keep(block)

    def keep(self, block):
        self.block = [block.to("meta")]

    def gather(self):
        return own.Gather.apply(self.shard)

    def compute(self, *args, **kwargs):
        weights, whole = {}, self.gather()
        for name, like in self.block[0].named_parameters():
            weights[name] = whole[: like.numel()].view(like.shape)
            whole = whole[like.numel() :]
        return functional_call(self.block[0], weights, args, kwargs)

    def forward(self, *args, **kwargs):
        return checkpoint(self.compute, *args, use_reentrant=False, **kwargs)


class KeepsTheBlock(RightBlock):
    def keep(self, block):
        self.block = [block]


class TrainsTheBlock(RightBlock):
    def keep(self, block):
        self.block = nn.ModuleList([block])


class GathersOnce(RightBlock):
    def forward(self, *args, **kwargs):
        return self.compute(*args, **kwargs)


class GathersWithoutGradient(RightBlock):
    def gather(self):
        return own.Gather.apply(self.shard.detach()).requires_grad_()


class KeepsTheWholeForBackward(RightBlock):
    def gather(self):
        whole = super().gather()
        self.last = whole.detach()
        whole.register_hook(lambda _: setattr(self, "last", None))
        return whole


MISTAKES = {
    "Gather": [
        (Sums, "rank 0's gradient is the sum"),
        (ScattersOnRank0Alone, "for another rank that never made that call"),
        (ChangesItsGradient, "clone it"),
    ],
    "ShardedBlock": [
        (KeepsTheBlock, "Who keeps the whole weights?"),
        (TrainsTheBlock, "only this rank's chunk may be an nn.Parameter"),
        (GathersOnce, "FSDP2 gathers again in backward"),
        (KeepsTheWholeForBackward, "between forward and backward"),
        (GathersWithoutGradient, "gradient is missing"),
    ],
}
