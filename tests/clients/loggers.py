"""Log to TensorBoard, Weights & Biases (offline) and MLflow (files): a small callback each."""

import sys
from pathlib import Path

import mlflow
import torch
import wandb
from torch import nn
from torch.utils.tensorboard import SummaryWriter

from datautils import MyTrainDataset
from ddp_ref import Callback, Handler, cleanup_ddp


class Logger(Callback):
    """Rank 0 writes the last values of `handler.history` after each epoch."""

    def on_train_start(self):
        if self.handler.rank == 0:
            self.open()

    def on_epoch_end(self):
        if self.handler.rank == 0:
            last = {name: values[-1] for name, values in self.handler.history.items()}
            self.write(last, self.handler.epoch)

    def on_train_end(self):
        if self.handler.rank == 0:
            self.close()


class TensorBoard(Logger):
    def __init__(self, folder):
        self.folder = folder

    def open(self):
        self.writer = SummaryWriter(self.folder)

    def write(self, values, epoch):
        for name, value in values.items():
            self.writer.add_scalar(name, value, epoch)

    def close(self):
        self.writer.close()


class WandB(Logger):
    def __init__(self, **settings):
        self.settings = settings

    def open(self):
        self.run = wandb.init(**self.settings)

    def write(self, values, epoch):
        self.run.log(values, step=epoch)

    def close(self):
        self.run.finish()


class MLflow(Logger):
    def __init__(self, uri, experiment):
        self.uri, self.experiment = uri, experiment

    def open(self):
        mlflow.set_tracking_uri(self.uri)
        mlflow.set_experiment(self.experiment)
        mlflow.start_run()

    def write(self, values, epoch):
        mlflow.log_metrics(values, step=epoch)

    def close(self):
        mlflow.end_run()


def train(folder, epochs=3):
    folder = Path(folder).resolve()
    torch.manual_seed(0)
    model = nn.Linear(64, 10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    callbacks = [
        TensorBoard(folder / "tensorboard"),
        WandB(project="digits", mode="offline", dir=folder),
        MLflow((folder / "mlruns").as_uri(), experiment="digits"),
    ]
    handler = Handler(model, optimizer, nn.functional.cross_entropy, callbacks=callbacks)
    handler.set_train_loader(MyTrainDataset(), batch_size=32)
    handler.set_val_loader(MyTrainDataset(train=False), batch_size=32)
    handler.train(epochs)
    return handler


if __name__ == "__main__":
    train(sys.argv[1])
    cleanup_ddp()
