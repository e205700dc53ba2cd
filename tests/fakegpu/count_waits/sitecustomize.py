"""Put this folder on PYTHONPATH: each loop over a DataLoader then prints how often it waits.

Counted is what the body of the loop waits for the fake GPU, in all its iterations.
"""

import sys

import torch
from torch.utils.data import DataLoader

WAITS = ("streamSync", "eventSync", "deviceSync", "memcpySync")
iterate = DataLoader.__iter__


def waits():
    counts = torch._fake_counts()
    return sum(counts[name] for name in WAITS)


def counted(self):
    before = waits()
    yield from iterate(self)
    sys.stdout.write(f"{len(self)} batches, {waits() - before} waits\n")


DataLoader.__iter__ = counted
