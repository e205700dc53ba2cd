"""A small job for the tests of Handler: data with an augmentation, a model with dropout."""

import torch
from torch import nn
from torch.utils.data import Dataset

from ddp_ref import Handler

# The first optimizer sets an environment variable, and no test may change the environment.
torch.optim.SGD(nn.Linear(1, 1).parameters())


class Points(Dataset):
    """Points in four dimensions, and on which side of a plane each lies, with optional noise."""

    def __init__(self, size, noise=0.0, dtype=torch.float32):
        generator = torch.Generator().manual_seed(1)
        self.inputs = torch.randn(size, 4, generator=generator, dtype=dtype)
        self.targets = (self.inputs.sum(1) > 0).long()
        self.noise = noise

    def __len__(self):
        return len(self.inputs)

    def __getitem__(self, index):
        inputs = self.inputs[index]
        if self.noise:
            inputs = inputs + self.noise * torch.randn(4)
        return inputs, self.targets[index]


def network(dropout=0.0, dtype=torch.float32):
    torch.manual_seed(7)
    layers = nn.Linear(4, 8), nn.Tanh(), nn.Dropout(dropout), nn.Linear(8, 2)
    return nn.Sequential(*layers).to(dtype)


def accuracy(outputs, targets):
    return (outputs.argmax(1) == targets).double().mean()


def job(size=20, batch_size=3, *, model=None, lr=0.1, fused=None, loader=None, **options):
    """Return a Handler on the CPU with a training set. `loader` has options of its DataLoader."""
    torch.set_num_threads(1)
    model = network() if model is None else model
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9, fused=fused)
    options = {"device": "cpu", "metrics": {"accuracy": accuracy}} | options
    if callable(scheduler := options.get("scheduler")):
        options["scheduler"] = scheduler(optimizer)
    handler = Handler(model, optimizer, nn.functional.cross_entropy, **options)
    data = Points(size, dtype=next(model.parameters()).dtype)
    handler.set_train_loader(data, batch_size, **(loader or {}))
    return handler


def flat(model):
    return torch.cat([value.detach().reshape(-1).clone() for value in model.parameters()])
