"""Hugging Face Accelerate.

Start it by torchrun --nproc-per-node 2 accelerate_loop.py
"""

import torch
from accelerate import Accelerator
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, TensorDataset

from toolkit.runtime import CyclicDataParallel


def main() -> None:
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    images, labels = (torch.as_tensor(part) for part in load_digits(return_X_y=True))
    data = TensorDataset(images.float() / 16, labels)
    loader = DataLoader(data, batch_size=16, shuffle=True, drop_last=True)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU())
    model.append(nn.Linear(64, 10))

    # The model is not prepared: its passes, and the messages beside them, are the schedule's.
    model = CyclicDataParallel(
        model,
        optimizer=lambda p: SGD(p, lr=0.05, momentum=0.9),
        rule="cdp_v1",
        accumulate=2,
    )
    loader, optimizer = accelerator.prepare(loader, model.optimizer)
    scheduler = StepLR(model.optimizer, step_size=160, gamma=0.3)
    for epoch in range(8):
        model.train()
        for x, y in loader:
            with accelerator.accumulate(model):
                loss = cross_entropy(model(x), y)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                scheduler.step()
        model.eval()
        with torch.no_grad():
            accuracy = (model(images.float() / 16).argmax(1) == labels).float().mean()
        accelerator.print(
            f"epoch {epoch}: loss {loss.item():.3f}, accuracy {accuracy:.1%}"
        )
    accelerator.end_training()


if __name__ == "__main__":
    main()
