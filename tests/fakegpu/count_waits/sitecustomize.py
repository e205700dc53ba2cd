"""Put this folder on PYTHONPATH: each loop over a DataLoader then prints how often it waits.

First come the waits for the fake GPU since the last loop, then those of the loop's body, over all
iterations.
"""

import os
import sys

import torch
from torch.utils.data import DataLoader

WAITS = ("streamSync", "eventSync", "deviceSync", "memcpySync")
iterate = DataLoader.__iter__
ended = 0  # the waits until the end of the last loop


def waits():
    counts = torch._fake_counts()
    return sum(counts[name] for name in WAITS)


def loop(self):
    global ended
    started = waits()
    yield from iterate(self)
    between, inside, ended = started - ended, waits() - started, waits()
    counted = f"{between} waits, then {len(self)} batches, {inside} waits"
    sys.stdout.write(f"process {os.getpid()}: {counted}\n")


DataLoader.__iter__ = loop
