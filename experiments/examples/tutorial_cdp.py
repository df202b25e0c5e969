"""A trainer class that saves snapshots, as in the tutorials on DistributedDataParallel.

Start it by torchrun --standalone --nproc-per-node 2 FILE --epochs 6. It continues from its
snapshot, if there is one.
"""

import argparse
import os

import torch
from torch import nn
from torch.distributed import destroy_process_group, init_process_group
from torch.nn import functional as F
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from toolkit.runtime import prepare


def make_dataset(dtype=torch.float32):
    """Inputs of 20 numbers, and what a fixed network makes of them."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(512, 20, generator=generator)
    hidden = torch.tanh(inputs @ torch.randn(20, 8, generator=generator) / 4)
    targets = hidden @ torch.randn(8, 1, generator=generator)
    return TensorDataset(inputs.to(dtype), targets.to(dtype))


def make_loader(dataset, batch_size, rank, world_size):
    sampler = DistributedSampler(dataset, num_replicas=world_size, rank=rank)
    return DataLoader(dataset, batch_size, sampler=sampler)


def make_model(dtype=torch.float32):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 64), nn.ReLU())
    for _ in range(2):
        model.extend([nn.Linear(64, 64), nn.ReLU()])
    model.append(nn.Linear(64, 1))
    return model.to(dtype)


def make_optimizer(parameters):
    return torch.optim.SGD(parameters, lr=0.05)


class Trainer:
    """Trains a model for some epochs; rank 0 saves snapshots."""

    def __init__(self, model, loader, optimizer, save_every, snapshot_path):
        self.rank = int(os.environ["RANK"])
        self.model = model
        self.loader = loader
        self.optimizer = optimizer
        self.save_every = save_every
        self.snapshot_path = snapshot_path
        self.epochs_run = 0
        if os.path.exists(snapshot_path):
            self._load_snapshot()
        self.model, self.optimizer = prepare(model, optimizer, rule=os.getenv("RULE", "cdp_v2"))

    def _load_snapshot(self):
        snapshot = torch.load(self.snapshot_path)
        self.model.load_state_dict(snapshot["model"])
        self.epochs_run = snapshot["epochs_run"]
        print(f"[rank {self.rank}] continues after {self.epochs_run} epochs")

    def _save_snapshot(self, epoch):
        snapshot = {"model": self.model.module.state_dict(), "epochs_run": epoch + 1}
        torch.save(snapshot, self.snapshot_path)
        print(f"epoch {epoch}: snapshot saved to {self.snapshot_path}")

    def _run_batch(self, inputs, targets):
        self.optimizer.zero_grad()
        output = self.model(inputs)
        loss = F.mse_loss(output, targets)
        loss.backward()
        self.optimizer.step()
        return loss.item()

    def _run_epoch(self, epoch):
        self.loader.sampler.set_epoch(epoch)
        losses = [self._run_batch(inputs, targets) for inputs, targets in self.loader]
        mean = sum(losses) / len(losses)
        print(f"[rank {self.rank}] epoch {epoch}: {len(losses)} steps, loss {mean:.4f}")

    def train(self, epochs):
        for epoch in range(self.epochs_run, epochs):
            self._run_epoch(epoch)
            if self.rank == 0 and (epoch + 1) % self.save_every == 0:
                self._save_snapshot(epoch)


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=6, help="epochs in all")
    parser.add_argument(
        "--save-every", type=int, default=1, help="epochs between snapshots"
    )
    parser.add_argument(
        "--batch-size", type=int, default=32, help="samples of a rank's batch"
    )
    parser.add_argument(
        "--snapshot", default="snapshot.pt", help="file of the snapshot"
    )
    parser.add_argument("--dtype", default="float32", help="type of weights and data")
    return parser.parse_args()


def main(args):
    init_process_group("gloo")
    rank = int(os.environ["RANK"])
    world_size = int(os.environ["WORLD_SIZE"])
    dtype = getattr(torch, args.dtype)
    model = make_model(dtype)
    optimizer = make_optimizer(model.parameters())
    loader = make_loader(make_dataset(dtype), args.batch_size, rank, world_size)
    trainer = Trainer(model, loader, optimizer, args.save_every, args.snapshot)
    trainer.train(args.epochs)
    destroy_process_group()


if __name__ == "__main__":
    main(parse_args())
