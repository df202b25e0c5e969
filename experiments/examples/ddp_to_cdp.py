"""Handwritten digits by cyclic data parallelism.

Start it by torchrun --nproc-per-node 2 ddp_to_cdp.py
"""

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from toolkit.runtime import CyclicDataParallel

EPOCHS = 6


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    images, labels = (torch.as_tensor(part) for part in load_digits(return_X_y=True))
    data = TensorDataset(images.float().view(-1, 1, 8, 8) / 16, labels)
    train, test = torch.utils.data.random_split(data, [1437, 360])
    sampler = DistributedSampler(train)
    loader = DataLoader(train, batch_size=32, sampler=sampler, drop_last=True)

    model = nn.Sequential(
        *(nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()),
        *(nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.BatchNorm2d(32), nn.ReLU()),
        *(nn.Flatten(), nn.Linear(512, 10)),
    )
    model = CyclicDataParallel(model, optimizer=lambda p: SGD(p, lr=0.05, momentum=0.9))
    optimizer = model.optimizer
    scheduler = CosineAnnealingLR(optimizer, EPOCHS)
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        model.train()
        for x, y in loader:
            optimizer.zero_grad()
            loss = cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
        scheduler.step()
        model.eval()
        with torch.no_grad():
            hits = sum(
                (model(x).argmax(1) == y).sum().item() for x, y in DataLoader(test, 60)
            )
        if dist.get_rank() == 0:
            print(
                f"epoch {epoch}: loss {loss.item():.3f}, test accuracy {hits / len(test):.1%}"
            )
    if dist.get_rank() == 0:
        torch.save(model.state_dict(), "digits.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
