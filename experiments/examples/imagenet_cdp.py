"""A residual network on synthetic images, with the training loop of the ImageNet example.

Start it by torchrun --standalone --nproc-per-node 2 FILE --epochs 4. Continue it by
--resume OUTPUT/checkpoint.pth.tar.
"""

import argparse
import os
import shutil
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from toolkit.runtime import prepare


class BasicBlock(nn.Module):
    """Two convolutions with a shortcut."""

    def __init__(self, n_in, n_out, stride=1):
        super().__init__()
        self.conv1 = nn.Conv2d(n_in, n_out, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(n_out)
        self.conv2 = nn.Conv2d(n_out, n_out, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(n_out)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = None
        if stride != 1 or n_in != n_out:
            convolution = nn.Conv2d(n_in, n_out, 1, stride, bias=False)
            self.downsample = nn.Sequential(convolution, nn.BatchNorm2d(n_out))

    def forward(self, x):
        shortcut = x if self.downsample is None else self.downsample(x)
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += shortcut
        return self.relu(out)


class ResNet(nn.Module):
    """A residual network for images of 12 x 12 pixels."""

    def __init__(self, n_classes=10):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(8)
        self.relu = nn.ReLU(inplace=True)
        self.layer1 = BasicBlock(8, 8)
        self.layer2 = BasicBlock(8, 16, stride=2)
        self.layer3 = BasicBlock(16, 32, stride=2)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(32, n_classes)

    def forward(self, x):
        x = self.relu(self.bn1(self.conv1(x)))
        x = self.layer3(self.layer2(self.layer1(x)))
        return self.fc(torch.flatten(self.avgpool(x), 1))


def make_model(dtype=torch.float32):
    torch.manual_seed(0)
    return ResNet().to(dtype)


def make_datasets(dtype=torch.float32):
    """Return noisy images of ten classes, for training and for validation."""
    generator = torch.Generator().manual_seed(0)
    classes = torch.randn(10, 3, 12, 12, generator=generator)
    labels = torch.randint(10, (640,), generator=generator)
    noise = torch.randn(640, 3, 12, 12, generator=generator)
    images = (0.6 * classes[labels] + noise).to(dtype)
    return TensorDataset(images[:512], labels[:512]), TensorDataset(
        images[512:], labels[512:]
    )


def make_loader(dataset, batch_size, rank, world_size, shuffle):
    sampler = DistributedSampler(dataset, world_size, rank, shuffle=shuffle)
    return DataLoader(dataset, batch_size, sampler=sampler, drop_last=shuffle)


class AverageMeter:
    """A value and its mean over samples."""

    def __init__(self, name, form):
        self.name = name
        self.form = form
        self.value = 0.0
        self.total = 0.0
        self.count = 0

    def update(self, value, n=1):
        self.value = value
        self.total += value * n
        self.count += n

    def all_reduce(self):
        sums = torch.tensor([self.total, self.count], dtype=torch.float64)
        dist.all_reduce(sums)
        self.total, self.count = sums.tolist()

    @property
    def average(self):
        return self.total / max(self.count, 1)

    def __str__(self):
        return f"{self.name} {self.value:{self.form}} ({self.average:{self.form}})"


def show_progress(title, batch, n_batches, meters):
    if dist.get_rank() == 0:
        print("  ".join([f"{title} [{batch}/{n_batches}]", *map(str, meters)]))


def count_hits(output, target, ks=(1, 5)):
    """Return the percentage of samples whose class is among the k likeliest, for each k."""
    likeliest = output.topk(max(ks)).indices
    hits = likeliest == target[:, None]
    return [100 * hits[:, :k].any(1).double().mean().item() for k in ks]


def train(loader, model, criterion, optimizer, epoch, args):
    batch_time = AverageMeter("time", ".3f")
    losses = AverageMeter("loss", ".4f")
    top1 = AverageMeter("acc@1", ".1f")
    top5 = AverageMeter("acc@5", ".1f")
    model.train()
    end = time.time()
    for i, (images, target) in enumerate(loader):
        output = model(images)
        loss = criterion(output, target)

        acc1, acc5 = count_hits(output, target)
        losses.update(loss.item(), len(images))
        top1.update(acc1, len(images))
        top5.update(acc5, len(images))

        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

        batch_time.update(time.time() - end)
        end = time.time()
        if (i + 1) % args.print_freq == 0:
            show_progress(
                f"epoch {epoch}", i + 1, len(loader), [batch_time, losses, top1, top5]
            )


def validate(loader, model, criterion):
    """Return the accuracy of all ranks' samples, of which each rank evaluates its share."""
    losses = AverageMeter("loss", ".4f")
    top1 = AverageMeter("acc@1", ".1f")
    top5 = AverageMeter("acc@5", ".1f")
    meters = [losses, top1, top5]
    model.eval()
    with torch.no_grad():
        for images, target in loader:
            output = model(images)
            acc1, acc5 = count_hits(output, target)
            losses.update(criterion(output, target).item(), len(images))
            top1.update(acc1, len(images))
            top5.update(acc5, len(images))
    for meter in meters:
        meter.all_reduce()
    show_progress("validation", len(loader), len(loader), meters)
    return top1.average


def save_checkpoint(state, is_best, folder):
    path = os.path.join(folder, "checkpoint.pth.tar")
    torch.save(state, path)
    if is_best:
        shutil.copyfile(path, os.path.join(folder, "model_best.pth.tar"))


def parse_args(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=4, help="epochs in all")
    parser.add_argument("--start-epoch", type=int, default=0)
    parser.add_argument(
        "--batch-size", type=int, default=32, help="images of a rank's batch"
    )
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--momentum", type=float, default=0.9)
    parser.add_argument("--weight-decay", type=float, default=1e-4)
    parser.add_argument(
        "--step-size", type=int, default=2, help="epochs of a learning rate"
    )
    parser.add_argument("--print-freq", type=int, default=4)
    parser.add_argument("--resume", default="", help="checkpoint to continue from")
    parser.add_argument("--evaluate", action="store_true", help="only validate")
    parser.add_argument("--output", default=".", help="folder of checkpoints")
    parser.add_argument("--dtype", default="float32", help="type of weights and images")
    return parser.parse_args(arguments)


def main(args):
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    dtype = getattr(torch, args.dtype)
    best_acc1 = 0.0

    model = make_model(dtype)
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(
        model.parameters(),
        args.lr,
        momentum=args.momentum,
        weight_decay=args.weight_decay,
    )
    model, optimizer = prepare(model, optimizer, rule=os.getenv("RULE", "cdp_v2"))
    scheduler = StepLR(optimizer, step_size=args.step_size, gamma=0.1)

    if args.resume:
        checkpoint = torch.load(args.resume)
        args.start_epoch = checkpoint["epoch"]
        best_acc1 = checkpoint["best_acc1"]
        model.load_state_dict(checkpoint["state_dict"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        scheduler.load_state_dict(checkpoint["scheduler"])

    train_set, val_set = make_datasets(dtype)
    train_loader = make_loader(
        train_set, args.batch_size, rank, world_size, shuffle=True
    )
    val_loader = make_loader(val_set, args.batch_size, rank, world_size, shuffle=False)
    if args.evaluate:
        validate(val_loader, model, criterion)
        dist.destroy_process_group()
        return

    for epoch in range(args.start_epoch, args.epochs):
        train_loader.sampler.set_epoch(epoch)
        train(train_loader, model, criterion, optimizer, epoch, args)
        acc1 = validate(val_loader, model, criterion)
        scheduler.step()
        is_best = acc1 > best_acc1
        best_acc1 = max(acc1, best_acc1)
        if rank == 0:
            state = {
                "epoch": epoch + 1,
                "state_dict": model.state_dict(),
                "best_acc1": best_acc1,
                "optimizer": optimizer.state_dict(),
                "scheduler": scheduler.state_dict(),
            }
            save_checkpoint(state, is_best, args.output)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(parse_args())
