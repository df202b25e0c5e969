"""A small GPT on synthetic tokens, with the training loop of nanoGPT.

Gradients are accumulated and clipped, the learning rate is set by hand, and the master process
alone evaluates and saves. Start it by torchrun --standalone --nproc-per-node 2 FILE.
"""

import argparse
import math
import os

import torch
from torch import nn
from torch.distributed import destroy_process_group, init_process_group
from torch.nn import functional as F

from toolkit.runtime import prepare

VOCAB_SIZE = 32
BLOCK_SIZE = 24


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self, width, n_heads):
        super().__init__()
        self.n_heads = n_heads
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x):
        query, key, value = (
            part.unflatten(-1, (self.n_heads, -1)).transpose(1, 2)
            for part in self.qkv(x).chunk(3, dim=-1)
        )
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """Attention and a two-layer network, each with a residual."""

    def __init__(self, width, n_heads):
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = Attention(width, n_heads)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width),
            nn.GELU(),
            nn.Linear(4 * width, width),
            nn.Dropout(0.0),
        )

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """A decoder whose output layer shares the weights of the token embedding."""

    def __init__(self, width=32, n_heads=4, n_layers=4):
        super().__init__()
        self.tokens = nn.Embedding(VOCAB_SIZE, width)
        self.positions = nn.Embedding(BLOCK_SIZE, width)
        self.blocks = nn.ModuleList(Block(width, n_heads) for _ in range(n_layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCAB_SIZE, bias=False)
        self.head.weight = self.tokens.weight
        self.apply(self._init_weights)

    def _init_weights(self, module):
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.08)

    def forward(self, idx, targets=None):
        x = self.tokens(idx) + self.positions(
            torch.arange(idx.shape[1], device=idx.device)
        )
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        if targets is None:
            return logits, None
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1)
        return logits, loss

    def configure_optimizers(self, learning_rate, weight_decay):
        """Return AdamW that decays matrices, but neither biases nor norms."""
        parameters = [p for p in self.parameters() if p.requires_grad]
        groups = [
            {
                "params": [p for p in parameters if p.dim() >= 2],
                "weight_decay": weight_decay,
            },
            {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
        ]
        return torch.optim.AdamW(groups, lr=learning_rate, betas=(0.9, 0.95))


def make_tokens():
    """Return tokens for training and for validation.

    Each token has a successor, which follows it in 9 of 10 cases.
    """
    generator = torch.Generator().manual_seed(0)
    successor = torch.randperm(VOCAB_SIZE, generator=generator).tolist()
    random_tokens = torch.randint(VOCAB_SIZE, (8000,), generator=generator).tolist()
    follows = (torch.rand(8000, generator=generator) < 0.9).tolist()
    tokens = random_tokens[:1]
    for token, is_successor in zip(random_tokens[1:], follows[1:], strict=True):
        tokens.append(successor[tokens[-1]] if is_successor else token)
    return {"train": torch.tensor(tokens[:7000]), "val": torch.tensor(tokens[7000:])}


def get_batch(tokens, batch_size, number):
    """Return inputs and targets of a batch, which its number determines."""
    generator = torch.Generator().manual_seed(number)
    starts = torch.randint(len(tokens) - BLOCK_SIZE, (batch_size,), generator=generator)
    x = torch.stack([tokens[start : start + BLOCK_SIZE] for start in starts])
    y = torch.stack([tokens[start + 1 : start + 1 + BLOCK_SIZE] for start in starts])
    return x, y


def get_lr(iter_num, args):
    """Return a learning rate that rises linearly, and falls by a cosine to a tenth."""
    if iter_num < args.warmup_iters:
        return args.learning_rate * (iter_num + 1) / (args.warmup_iters + 1)
    ratio = (iter_num - args.warmup_iters) / (args.lr_decay_iters - args.warmup_iters)
    coefficient = 0.5 * (1 + math.cos(math.pi * min(ratio, 1.0)))
    return args.learning_rate * (0.1 + 0.9 * coefficient)


@torch.no_grad()
def estimate_loss(model, tokens, args):
    """Return the mean loss on some batches for training and for validation."""
    model.eval()
    means = {}
    for split in ("train", "val"):
        losses = torch.zeros(args.eval_iters)
        for k in range(args.eval_iters):
            _, loss = model(*get_batch(tokens[split], args.batch_size, 10**9 + k))
            losses[k] = loss.item()
        means[split] = losses.mean().item()
    model.train()
    return means


def parse_args(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out-dir", default="out", help="folder of the checkpoint")
    parser.add_argument("--init-from", choices=["scratch", "resume"], default="scratch")
    parser.add_argument("--max-iters", type=int, default=40)
    parser.add_argument(
        "--eval-interval", type=int, default=10, help="also of checkpoints"
    )
    parser.add_argument("--eval-iters", type=int, default=4)
    parser.add_argument(
        "--batch-size", type=int, default=8, help="rows of a micro-batch"
    )
    parser.add_argument(
        "--accum", type=int, default=2, help="micro-batches of a rank's iteration"
    )
    parser.add_argument("--learning-rate", type=float, default=1e-2)
    parser.add_argument("--weight-decay", type=float, default=0.1)
    parser.add_argument("--grad-clip", type=float, default=1.0, help="0: no clipping")
    parser.add_argument("--warmup-iters", type=int, default=4)
    parser.add_argument("--lr-decay-iters", type=int, default=40)
    parser.add_argument("--seed", type=int, default=1337)
    parser.add_argument("--dtype", default="float32", help="type of the weights")
    return parser.parse_args(arguments)


def main(args):
    init_process_group("gloo")
    rank = int(os.environ["RANK"])
    world_size = int(os.environ["WORLD_SIZE"])
    master_process = rank == 0
    accum = args.accum
    torch.manual_seed(args.seed + rank)  # weights of rank 0 become everyone's
    if master_process:
        os.makedirs(args.out_dir, exist_ok=True)
    checkpoint_path = os.path.join(args.out_dir, "ckpt.pt")
    tokens = make_tokens()

    model = GPT().to(getattr(torch, args.dtype))
    optimizer = model.configure_optimizers(args.learning_rate, args.weight_decay)
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    iter_num, best_val_loss = 0, 1e9
    if args.init_from == "resume":
        checkpoint = torch.load(checkpoint_path)
        model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        iter_num, best_val_loss = checkpoint["iter_num"], checkpoint["best_val_loss"]
    model, optimizer = prepare(model, optimizer, rule=os.getenv("RULE", "cdp_v2"), accumulate=accum)
    raw_model = model.module

    while True:
        lr = get_lr(iter_num, args)
        for param_group in optimizer.param_groups:
            param_group["lr"] = lr

        if iter_num % args.eval_interval == 0 and master_process:
            losses = estimate_loss(model, tokens, args)
            train_loss, val_loss = losses["train"], losses["val"]
            print(
                f"iter {iter_num}: train loss {train_loss:.4f}, val loss {val_loss:.4f}"
            )
            best_val_loss = min(best_val_loss, val_loss)
            if iter_num > 0:
                checkpoint = {
                    "model": raw_model.state_dict(),
                    "optimizer": optimizer.state_dict(),
                    "iter_num": iter_num,
                    "best_val_loss": best_val_loss,
                }
                torch.save(checkpoint, checkpoint_path)
        if iter_num >= args.max_iters:
            break

        for micro_step in range(accum):
            # Gradients are averaged over ranks once an iteration.
            model.require_backward_grad_sync = micro_step == accum - 1
            number = (iter_num * accum + micro_step) * world_size + rank
            x, y = get_batch(tokens["train"], args.batch_size, number)
            _, loss = model(x, y)
            loss = loss / accum
            scaler.scale(loss).backward()
        if args.grad_clip != 0.0:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), args.grad_clip)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        if iter_num % 10 == 9 and master_process:
            print(f"iter {iter_num}: loss {loss.item() * accum:.4f}")
        iter_num += 1

    destroy_process_group()


if __name__ == "__main__":
    main(parse_args())
