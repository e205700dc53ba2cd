"""What the ranks hold, side by side."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor


def print_side_by_side(held: Sequence[Mapping[str, Tensor]]) -> set[str]:
    """Print a line for each name: every rank's tensor, and whether all are the same.

    held: by rank and name; all ranks have the same names. Returns the names of what is the same.
    """
    first = held[0]
    same = {name for name in first if all(torch.equal(first[name], own[name]) for own in held)}
    texts = [{name: _numbers(own[name]) for name in first} for own in held]
    width = max(len(text) for own in texts for text in own.values())
    label = max(map(len, first))
    print(" " * label, *(f"{f'rank {rank}':{width}}" for rank in range(len(held))), sep=" | ")
    for name in first:
        columns = [f"{own[name]:{width}}" for own in texts]
        print(f"{name:{label}}", *columns, "same" if name in same else "differ", sep=" | ")
    return same


def _numbers(tensor: Tensor) -> str:
    digits = ".2f" if tensor.is_floating_point() else "d"
    return " ".join(f"{number:{digits}}" for number in tensor.flatten().tolist())
