"""Validate with F1 and AUROC of torchmetrics, which are not means over batches."""

import torch
from torch import nn
from torchmetrics.classification import MulticlassAUROC, MulticlassF1Score

from datautils import MyTrainDataset
from ddp_ref import Handler, cleanup_ddp


def train(epochs=2):
    torch.manual_seed(0)
    model = nn.Linear(64, 10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    metrics = {"f1": MulticlassF1Score(10, average="macro"), "auroc": MulticlassAUROC(10)}
    handler = Handler(model, optimizer, nn.functional.cross_entropy, metrics=metrics)
    handler.set_train_loader(MyTrainDataset(), batch_size=32)
    test_set = MyTrainDataset(train=False)  # 357 items: 179 and 178 on two ranks
    handler.set_val_loader(test_set, batch_size=32)
    handler.train(epochs)
    return handler


if __name__ == "__main__":
    handler = train()
    if handler.rank == 0:
        print({name: round(values[-1], 4) for name, values in handler.val_metrics.items()})
    cleanup_ddp()
