"""Train a GAN in a loop of your own: two models, two optimizers and no Handler."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

from ddp_ref import (
    cleanup_ddp,
    eval_loader,
    initialize_ddp,
    on_rank,
    reduce_mean,
    reduce_sum,
    seed_everything,
    train_loader,
    wrap_model,
)


def points(size, seed=0):
    """Return points around (2, -1), which the generator learns to imitate."""
    generator = torch.Generator().manual_seed(seed)
    around = torch.tensor([0.5, 0.2]) * torch.randn(size, 2, generator=generator)
    return TensorDataset(torch.tensor([2.0, -1.0]) + around)


@on_rank(0)
def save(path, generator):
    torch.save(generator.state_dict(), path)


def train(epochs=15, path="generator.pt"):
    info = initialize_ddp()
    seed_everything(0)
    generator = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 2))
    critic = nn.Sequential(nn.Linear(2, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1))
    ddp_generator = wrap_model(generator, info.device)
    ddp_critic = wrap_model(critic, info.device)
    g_optimizer = torch.optim.Adam(generator.parameters(), lr=2e-3, betas=(0.5, 0.9))
    d_optimizer = torch.optim.Adam(critic.parameters(), lr=2e-3, betas=(0.5, 0.9))
    loader = train_loader(points(1001), batch_size=32)
    seed_everything(0, info.rank)  # from here on each rank draws its own noise

    for epoch in range(epochs):
        loader.sampler.set_epoch(epoch)  # another order
        for (real,) in loader:
            real = real.to(info.device)
            fake = ddp_generator(torch.randn(len(real), 4, device=info.device))

            # One forward pass of the critic for both halves, because DDP expects one per backward.
            scores = ddp_critic(torch.cat([real, fake.detach()]))
            wanted = torch.cat([torch.ones(len(real), 1), torch.zeros(len(real), 1)])
            d_loss = F.binary_cross_entropy_with_logits(scores, wanted.to(info.device))
            d_optimizer.zero_grad()
            d_loss.backward()
            d_optimizer.step()

            # The critic without DDP: its gradients are not needed here, so nothing is sent.
            g_loss = F.softplus(-critic(fake)).mean()
            g_optimizer.zero_grad()
            g_loss.backward()
            g_optimizer.step()

        means = reduce_mean({"critic": d_loss.detach(), "generator": g_loss.detach()})
        if info.rank == 0:
            print(f"epoch {epoch + 1} | " + " | ".join(f"{k} {v:.4f}" for k, v in means.items()))

    save(path, generator)
    return generator, critic, score(critic, points(33, seed=1), info)


@torch.no_grad()
def score(critic, data, info):
    """Return the critic's mean score of `data`, each point once, on every rank."""
    total, seen = 0.0, 0
    for (real,) in eval_loader(data, batch_size=8):
        total += critic(real.to(info.device)).double().sum().item()
        seen += len(real)
    sums = reduce_sum({"total": total, "seen": seen})
    return sums["total"] / sums["seen"]


if __name__ == "__main__":
    train()
    cleanup_ddp()
