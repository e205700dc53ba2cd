"""Train on one device:  python scripts/single_gpu.py --epochs 20"""

import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, RandomSampler

import datautils


class Trainer:
    def __init__(self, model, train_data, test_data, optimizer, loss_fn, device, args):
        self.model = model.to(device)
        self.train_data = train_data
        self.test_data = test_data
        self.optimizer = optimizer
        self.loss_fn = loss_fn
        self.device = device
        self.args = args

    def _run_batch(self, source, targets):
        self.optimizer.zero_grad()
        loss = self.loss_fn(self.model(source), targets)
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def _run_epoch(self, epoch):
        # Draw the same order as DistributedSampler: randperm(n), seeded with seed + epoch.
        self.train_data.sampler.generator.manual_seed(self.args.seed + epoch)
        self.model.train()
        totals = torch.zeros(2, dtype=torch.float64, device=self.device)  # sum of losses, samples
        for source, targets in self.train_data:  # (batch, features), (batch,)
            source, targets = source.to(self.device), targets.to(self.device)
            loss = self._run_batch(source, targets)
            totals[0] += loss * len(targets)  # back from the batch's mean to its sum
            totals[1] += len(targets)
        return (totals[0] / totals[1]).item()

    def _evaluate(self):
        self.model.eval()
        totals = datautils.count_right(self.model, self.test_data, self.device)
        return (totals[0] / totals[1]).item()

    def _save_checkpoint(self, epoch):
        datautils.write_checkpoint(self.args.checkpoint, self.model.state_dict())
        print(f"epoch {epoch + 1} | saved {self.args.checkpoint}")

    def train(self, max_epochs):
        for epoch in range(max_epochs):
            loss = self._run_epoch(epoch)
            accuracy = self._evaluate()
            print(f"epoch {epoch + 1} | loss {loss:.4f} | test accuracy {accuracy:.4f}")
            if (epoch + 1) % self.args.save_every == 0 or epoch + 1 == max_epochs:
                self._save_checkpoint(epoch)


def load_train_objs(args):
    train_set, test_set, (features, outputs), loss_fn = datautils.load_dataset(args.dataset)
    torch.manual_seed(args.seed)  # the initial weights
    model = nn.Sequential(nn.Linear(features, 128), nn.ReLU(), nn.Linear(128, outputs))
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    return train_set, test_set, model, optimizer, loss_fn


def prepare_dataloader(dataset, args):
    sampler = RandomSampler(dataset, generator=torch.Generator())  # seeded before each epoch
    # With data that takes time to load, add num_workers=4 and, on a GPU, pin_memory=True.
    return DataLoader(dataset, args.batch_size, sampler=sampler)


def main(args):
    if args.device == "cuda" and not torch.cuda.is_available():
        sys.exit("error: --device cuda needs a GPU, found none: use --device cpu")
    use_gpu = torch.cuda.is_available() and args.device != "cpu"
    device = torch.device("cuda" if use_gpu else "cpu")
    train_set, test_set, model, optimizer, loss_fn = load_train_objs(args)
    train_data = prepare_dataloader(train_set, args)
    test_data = DataLoader(test_set, args.batch_size)
    trainer = Trainer(model, train_data, test_data, optimizer, loss_fn, device, args)
    print(f"device: {device.type} | batch: {args.batch_size} | steps per epoch: {len(train_data)}")
    trainer.train(args.epochs)


if __name__ == "__main__":
    args = datautils.parse_args(__doc__, checkpoint="checkpoint.pt")
    datautils.read_checkpoint(args.checkpoint)  # refuses to overwrite any other file
    main(args)
