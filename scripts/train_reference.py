"""Train with ddp_ref. Plain python, torchrun and srun start this same file:

torchrun --standalone --nproc_per_node=2 scripts/train_reference.py
"""

import os

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.elastic.multiprocessing.errors import record

import datautils
from ddp_ref import Checkpoint, Handler, TooFewGPUs, cleanup_ddp, initialize_ddp


def load_train_objs():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return datautils.MyTrainDataset(), model, optimizer


def accuracy(outputs, targets):
    return (outputs.argmax(1) == targets).float().mean()


@record  # so that torchrun shows the traceback of the process that failed first
def main(save_every, total_epochs, batch_size):
    try:
        info = initialize_ddp()
    except TooFewGPUs:  # on all ranks, which go on together; `describe` shows the numbers
        info = initialize_ddp(backend="gloo")  # on the CPU
    train_set, model, optimizer = load_train_objs()
    folder = os.environ.get("RUN_DIR") or "checkpoints"  # delete it to start over
    checkpoint = Checkpoint(folder, every_epochs=save_every)
    handler = Handler(
        model, optimizer, F.cross_entropy, metrics={"accuracy": accuracy}, callbacks=[checkpoint]
    )
    handler.set_train_loader(train_set, batch_size)
    handler.set_val_loader(datautils.MyTrainDataset(train=False), batch_size)
    handler.log(datautils.describe(info.device, info.world_size, len(handler.train_loader)))
    handler.load(folder)
    handler.train(total_epochs)  # with the test set as validation data, as in the other scripts
    handler.log(f"test accuracy {handler.validate()['accuracy']:.4f}")
    cleanup_ddp()  # waits for Gloo's threads, so the handler may live on


if __name__ == "__main__":
    args = datautils.parse_args(__doc__, launched=None)
    main(args.save_every, args.total_epochs, args.batch_size)
