"""Lightning Fabric.

Start it by torchrun --nproc-per-node 2 fabric_loop.py
"""

import torch
from lightning_fabric import Fabric
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim import AdamW
from torch.utils.data import DataLoader, TensorDataset

from toolkit.runtime import CyclicDataParallel


def main() -> None:
    fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
    fabric.launch()
    fabric.seed_everything(0)
    images, labels = (torch.as_tensor(part) for part in load_digits(return_X_y=True))
    data = TensorDataset(images.float() / 16, labels)
    loader = fabric.setup_dataloaders(
        DataLoader(data, 16, shuffle=True, drop_last=True)
    )
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU())
    model.append(nn.Linear(64, 10))

    # The model is not set up: its passes, and the messages beside them, are the schedule's.
    model = CyclicDataParallel(
        model, optimizer=lambda p: AdamW(p, lr=3e-3), rule="cdp_v2"
    )
    for epoch in range(4):
        model.train()
        for x, y in loader:
            model.optimizer.zero_grad()
            loss = cross_entropy(model(x), y)
            fabric.backward(loss)
            model.optimizer.step()
        model.eval()
        with torch.no_grad():
            accuracy = (model(images.float() / 16).argmax(1) == labels).float().mean()
        fabric.print(f"epoch {epoch}: loss {loss.item():.3f}, accuracy {accuracy:.1%}")


if __name__ == "__main__":
    main()
