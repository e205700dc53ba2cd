"""Typical wrong answers to stage 5 of myddp.py, and words of the hint that each must get."""

import torch
import torch.distributed as dist
from lesson import myddp
from torch import nn

own = myddp.load()


class Right:
    """The solution, in parts that a mistake can replace."""

    def __init__(self, model, lr):
        self.model, self.ring, self.lr = model, own.Ring(), lr
        whole = nn.utils.parameters_to_vector(model.parameters()).detach()
        nn.utils.vector_to_parameters(whole, model.parameters())
        self.whole, self.chunks = whole, whole.tensor_split(self.ring.world_size)
        self.make()

    def make(self):
        self.shard = self.chunks[self.ring.rank]
        self.optimizer = torch.optim.AdamW([self.shard], lr=self.lr)

    def gradients(self):
        return torch.cat([weight.grad.flatten() for weight in self.model.parameters()])

    def mean(self):
        chunks = self.gradients().tensor_split(self.ring.world_size)
        own.reduce_scatter(self.ring, chunks)
        return chunks[self.ring.rank] / self.ring.world_size

    def gather(self):
        own.all_gather(self.ring, self.chunks)

    def step(self):
        self.shard.grad = self.mean()
        self.optimizer.step()
        self.gather()
        self.shard.grad = None
        self.model.zero_grad()


class TakesTheSum(Right):
    def mean(self):
        return super().mean() * self.ring.world_size


class StepsEverything(Right):
    def make(self):
        self.shard = self.whole
        self.optimizer = torch.optim.AdamW([self.shard], lr=self.lr)

    def mean(self):
        dist.all_reduce(gradients := self.gradients())
        return gradients / self.ring.world_size


class ForgetsToGather(Right):
    def gather(self):
        pass


class StepsACopy(Right):
    def make(self):
        super().make()
        self.shard = self.shard.clone()
        self.optimizer = torch.optim.AdamW([self.shard], lr=self.lr)


class KeepsGradients(Right):
    def step(self):
        zero_grad, self.model.zero_grad = self.model.zero_grad, lambda: None
        super().step()
        self.model.zero_grad = zero_grad


class IgnoresItsRate(Right):
    def make(self):
        self.lr = 1e-3
        super().make()


class GathersOnRank0Alone(Right):
    def gather(self):
        if self.ring.rank == 0:
            super().gather()


MISTAKES = {
    "ShardedAdam": [
        (TakesTheSum, "is the sum over the ranks"),
        (StepsEverything, "AdamW steps 115456 of"),
        (ForgetsToGather, "the ranks now hold different weights"),
        (StepsACopy, "AdamW steps a copy"),
        (KeepsGradients, "Have you dropped the gradients"),
        (IgnoresItsRate, "leads to other weights than PyTorch's"),
        (GathersOnRank0Alone, "for another rank that never made that call"),
    ]
}
