"""The loss and the metrics of a batch, each a mean over its samples."""

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from .batches import move, pair, samples_in
from .rank_sync import Sums, Value


class LossAndMetrics:
    """Compute `loss_fn(outputs, targets)` and each metric on `device`, under `autocast`."""

    def __init__(
        self,
        loss_fn: Callable[[Any, Any], Tensor],
        metrics: Mapping[str, Callable[[Any, Any], Value]],
        device: torch.device,
        autocast: Callable[[], AbstractContextManager[Any]],
    ) -> None:
        if "loss" in metrics:
            raise ValueError(
                'a metric cannot be named "loss", which is the loss: choose another name'
            )
        if isinstance(loss_fn, nn.Module):  # it may have class weights
            loss_fn.to(device)
        self.loss_fn, self.metrics, self.device, self.autocast = loss_fn, metrics, device, autocast

    def new_sums(self) -> Sums:
        """Return empty sums for the loss and the metrics."""
        return Sums(["loss", *self.metrics], self.device)

    def __call__(self, model: nn.Module, batch: Any) -> tuple[Tensor, dict[str, Value]]:
        """Return the loss of `batch` for backward, and the values by name, the loss among them."""
        inputs, targets = pair(move(batch, self.device))
        with self.autocast():
            outputs = model(inputs)
            loss = self.loss_fn(outputs, targets)
            return loss, {"loss": loss} | self._metrics(outputs, targets)

    def _metrics(self, outputs: Any, targets: Any) -> dict[str, Value]:
        if not self.metrics:
            return {}
        with torch.no_grad():
            return {name: metric(outputs, targets) for name, metric in self.metrics.items()}

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """Return only the loss of `batch`."""
        inputs, targets = pair(move(batch, self.device))
        with self.autocast():
            return self.loss_fn(model(inputs), targets)

    def over(self, model: nn.Module, batches: Iterable[Any]) -> Sums:
        """Return the sums over all `batches`."""
        sums = self.new_sums()
        for batch in batches:
            _, values = self(model, batch)
            sums.add(samples_in(pair(batch)[1]), sums.means(values))
        return sums
