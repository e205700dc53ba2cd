"""Classify graphs with PyTorch Geometric: its own DataLoader, its own batches."""

import sys

import torch
from torch import nn
from torch_geometric.data import Data
from torch_geometric.loader import DataLoader
from torch_geometric.nn import GCNConv, global_mean_pool

from ddp_ref import Handler, cleanup_ddp


def graphs(size, seed=0):
    """Return paths (class 0) and rings (class 1) of 4 to 9 nodes, with noise on the features."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for number in range(size):
        nodes, ring = 4 + number % 6, number % 2
        start = torch.arange(nodes if ring else nodes - 1)
        edges = torch.stack([start, (start + 1) % nodes])
        edges = torch.cat([edges, edges.flip(0)], dim=1)
        degree = torch.bincount(edges[0], minlength=nodes).float()
        noise = 0.1 * torch.randn(nodes, 2, generator=generator)
        x = torch.stack([degree, torch.ones(nodes)], dim=1) + noise
        made.append(Data(x=x, edge_index=edges, y=torch.tensor([ring])))
    return made


class GCN(nn.Module):
    def __init__(self, hidden=16):
        super().__init__()
        self.first, self.second = GCNConv(2, hidden), GCNConv(hidden, hidden)
        self.dropout, self.head = nn.Dropout(0.1), nn.Linear(hidden, 2)

    def forward(self, x, edge_index, batch):
        x = self.first(x, edge_index).relu()
        x = self.second(x, edge_index).relu()
        return self.head(self.dropout(global_mean_pool(x, batch)))


def forward(model, batch):
    return model(batch.x, batch.edge_index, batch.batch), batch.y


def accuracy(outputs, targets):
    return (outputs.argmax(1) == targets).double().mean()


def train(folder, epochs):
    torch.manual_seed(0)
    model = GCN()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    handler = Handler(
        model,
        optimizer,
        nn.functional.cross_entropy,
        forward=forward,
        metrics={"accuracy": accuracy},
        run_dir=folder,
    )
    handler.set_train_loader(DataLoader(graphs(101), batch_size=8, shuffle=True, num_workers=1))
    handler.set_val_loader(DataLoader(graphs(31, seed=1), batch_size=8))
    handler.load(folder)
    handler.train(epochs)
    return handler


if __name__ == "__main__":
    train(sys.argv[1], epochs=int(sys.argv[2]))
    cleanup_ddp()
