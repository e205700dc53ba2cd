"""The how-to about Handler is right about which ways to compile a model under DDP do anything."""

import torch
import torch._dynamo
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddp_ref import initialize_ddp, run_ranks


class Blocks(nn.Sequential):
    def forward(self, inputs):
        for block in self:
            inputs = block(inputs)
        return inputs


def layers(kind=nn.Sequential):
    return kind(*(nn.Linear(512, 512, bias=False) for _ in range(6)))  # 1 MiB each


def ddp(model):
    return DistributedDataParallel(model, bucket_cap_mb=1)


def in_place(model, backend):
    model.compile(backend=backend)
    return ddp(model)


WAYS = {
    "compile(Blocks)": lambda b: torch.compile(layers(Blocks), backend=b),
    "ddp(compile(Blocks))": lambda b: ddp(torch.compile(layers(Blocks), backend=b)),
    "compile(ddp(Blocks))": lambda b: torch.compile(ddp(layers(Blocks)), backend=b),
    "ddp(compile(Sequential))": lambda b: ddp(torch.compile(layers(), backend=b)),
    "compile(ddp(Sequential))": lambda b: torch.compile(ddp(layers()), backend=b),
    "ddp(Sequential.compile())": lambda b: in_place(layers(), b),
}


def count_graphs():
    initialize_ddp()
    counts = []
    for build in WAYS.values():
        torch._dynamo.reset()
        graphs = []
        model = build(lambda graph, inputs, graphs=graphs: graphs.append(graph) or graph)
        for _ in range(3):
            model(torch.rand(4, 512)).sum().backward()
        counts.append(len(graphs))
    return counts


def test_the_graph_is_split_at_the_buckets_and_a_sequential_of_torchs_layers_may_not_be_compiled():
    assert run_ranks(count_graphs)[0] == [1, 6, 6, 6, 0, 0]
