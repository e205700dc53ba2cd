"""Train on one device:  python scripts/single_gpu.py [total_epochs] [save_every]"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

import datautils


class Trainer:
    def __init__(self, model, train_data, optimizer, device, save_every, test_data):
        self.device = device
        self.model = model.to(device)
        self.train_data = train_data
        self.optimizer = optimizer
        self.save_every = save_every
        self.test_data = test_data

    def _run_batch(self, source, targets):
        self.optimizer.zero_grad()
        output = self.model(source)
        loss = F.cross_entropy(output, targets)
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def _run_epoch(self, epoch):
        self.model.train()
        totals = torch.zeros(2, device=self.device)  # sum of the losses, number of samples
        for source, targets in self.train_data:  # (batch, 64), (batch,)
            loss = self._run_batch(source.to(self.device), targets.to(self.device))
            totals[0] += loss * len(targets)  # a mean over the batch, turned back into a sum
            totals[1] += len(targets)
        right = datautils.count_right(self.model, self.test_data, self.device)
        loss, accuracy = totals[0] / totals[1], right[0] / right[1]
        print(f"epoch {epoch} | loss {loss:.4f} | test accuracy {accuracy:.4f}")

    def _save_checkpoint(self, epoch):
        datautils.save("checkpoint.pt", self.model.state_dict(), epoch)

    def train(self, max_epochs):
        for epoch in range(1, max_epochs + 1):
            self._run_epoch(epoch)
            if epoch % self.save_every == 0 or epoch == max_epochs:
                self._save_checkpoint(epoch)


def load_train_objs():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return datautils.MyTrainDataset(), model, optimizer


def prepare_dataloader(dataset, batch_size):
    return DataLoader(dataset, batch_size, shuffle=True)


def main(device, total_epochs, save_every, batch_size):
    train_set, model, optimizer = load_train_objs()
    train_data = prepare_dataloader(train_set, batch_size)
    test_data = DataLoader(datautils.MyTrainDataset(train=False), batch_size)
    print(datautils.describe(device, 1, len(train_data)))
    Trainer(model, train_data, optimizer, device, save_every, test_data).train(total_epochs)


if __name__ == "__main__":
    args = datautils.parse_args(__doc__)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    main(device, args.total_epochs, args.save_every, args.batch_size)
