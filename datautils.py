"""The two data sets of the course: real handwritten digits and a toy that can be learned."""

from functools import cache

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor
from torch.utils.data import Dataset, TensorDataset


class MyTrainDataset(Dataset[tuple[Tensor, Tensor]]):
    """Hold `size` pairs of a uniform input (20,) and its target (1,), a fixed linear function of it.

    The inputs depend on `seed` alone, so every rank builds the same data set. The function is the
    same for every seed: what is learned on one seed can be tested on another. A linear model with
    MSE reaches a loss of 0.
    """

    def __init__(self, size: int, seed: int = 0) -> None:
        self.inputs = torch.rand(size, 20, generator=torch.Generator().manual_seed(seed))
        weight = torch.linspace(-1, 1, 20)
        self.targets = self.inputs @ weight[:, None] + 0.5  # (size, 20) @ (20, 1) -> (size, 1)

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.inputs[index], self.targets[index]


def digits(split: str) -> TensorDataset:
    """Return the "train" (1,440) or "test" (357) part of scikit-learn's 1,797 handwritten digits.

    An item is an image (64,), the 8x8 pixels row by row scaled to 0..1 (float32), and its digit
    0..9, a scalar (int64). The split is stratified and fixed, the same on every rank and run.
    """
    parts = _split_digits()
    if split not in parts:
        raise ValueError(f'split must be "train" or "test", not {split!r}')
    return parts[split]


@cache
def _split_digits() -> dict[str, TensorDataset]:
    images, labels = load_digits(return_X_y=True)  # (1797, 64) with values 0..16, (1797,)
    parts = train_test_split(images, labels, test_size=357, stratify=labels, random_state=0)
    train_x, test_x, train_y, test_y = map(torch.from_numpy, parts)
    return {
        "train": TensorDataset(train_x.float() / 16, train_y.long()),
        "test": TensorDataset(test_x.float() / 16, test_y.long()),
    }
