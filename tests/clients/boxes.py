"""Detect bright squares: a batch is a list of images of different sizes and a list of targets."""

import torch
from torch import nn
from torch.utils.data import Dataset

from ddp_ref import Handler, cleanup_ddp, eval_loader, gather_objects


class Squares(Dataset):
    """Images of 16 to 23 pixels with a bright square. One to three equal boxes mark the square."""

    def __init__(self, size, seed=0):
        self.size, self.seed = size, seed

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(1000 * self.seed + index)
        height, width = torch.randint(16, 24, (2,), generator=generator).tolist()
        left, top = torch.randint(0, 8, (2,), generator=generator).tolist()
        image = 0.1 * torch.rand(1, height, width, generator=generator)
        image[:, top : top + 8, left : left + 8] = 1.0
        corners = [left / width, top / height, (left + 8) / width, (top + 8) / height]
        number = 1 + index % 3  # boxes in this image
        return image, {"boxes": torch.tensor([corners] * number), "labels": torch.ones(number)}


class Detector(nn.Module):
    """Return boxes; with targets, return a loss as well, as detectors of other libraries do."""

    def __init__(self):
        super().__init__()
        self.pool, self.head = nn.AdaptiveAvgPool2d(8), nn.Linear(64, 4)

    def forward(self, images, targets=None):
        pooled = torch.stack([self.pool(image).flatten() for image in images])
        boxes = self.head(pooled)
        several = [box.expand(1 + i.shape[1] % 2, 4) for box, i in zip(boxes, images, strict=True)]
        outputs = {"boxes": several}  # one or two per image
        if targets is not None:
            pairs = zip(boxes, targets, strict=True)
            losses = [(box - target["boxes"]).square().mean() for box, target in pairs]
            outputs["loss"] = torch.stack(losses).mean()
        return outputs


def collate(items):
    images, targets = zip(*items, strict=True)
    return list(images), list(targets)


def forward(model, batch):
    images, targets = batch
    return model(images, targets), targets


def loss_fn(outputs, targets):
    return outputs["loss"]


def train(epochs=3):
    torch.manual_seed(0)
    model = Detector()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    handler = Handler(model, optimizer, loss_fn, forward=forward, count=lambda batch: len(batch[1]))
    handler.set_train_loader(Squares(96), batch_size=4, collate_fn=collate)
    handler.set_val_loader(Squares(25, seed=1), batch_size=4, collate_fn=collate)
    handler.train(epochs)
    return handler, detect(model.eval(), Squares(25, seed=1))


@torch.no_grad()
def detect(model, data):
    """Return the boxes of each image in order on rank 0, None elsewhere. Collective."""
    loader = eval_loader(data, batch_size=4, collate_fn=collate)
    own = [boxes for images, _ in loader for boxes in model(images)["boxes"]]
    every = gather_objects(own)  # of rank r: images r, r + world size, and so on
    return every and [every[n % len(every)][n // len(every)] for n in range(len(data))]


if __name__ == "__main__":
    handler, found = train()
    if handler.rank == 0:
        print(f"validation loss {handler.val_losses[-1]:.4f}, {len(found)} images")
    cleanup_ddp()
