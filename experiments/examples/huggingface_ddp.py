"""A causal language model of Hugging Face, in a PyTorch loop of one's own.

Start it by torchrun --standalone --nproc-per-node 2 FILE. It writes the trained model to
--output-dir, from which --model-name-or-path continues.
"""

import argparse
import math
import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import AdamW
from torch.utils.data import DataLoader, Dataset, DistributedSampler
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    get_linear_schedule_with_warmup,
    set_seed,
)

VOCAB_SIZE = 32
MAX_LENGTH = 16
PAD = 0


class Sentences(Dataset):
    """Rows of 8 to 16 tokens, padded; each token but one in ten determines the next."""

    def __init__(self, n_rows, seed):
        generator = torch.Generator().manual_seed(seed)
        shape = n_rows, MAX_LENGTH
        self.tokens = torch.randint(1, VOCAB_SIZE, shape, generator=generator)
        follows = torch.rand(shape, generator=generator) < 0.9
        for k in range(1, MAX_LENGTH):
            successor = self.tokens[:, k - 1] * 5 % (VOCAB_SIZE - 1) + 1
            self.tokens[:, k] = torch.where(follows[:, k], successor, self.tokens[:, k])
        self.lengths = torch.randint(8, MAX_LENGTH + 1, (n_rows,), generator=generator)

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, index):
        attention_mask = (torch.arange(MAX_LENGTH) < self.lengths[index]).long()
        input_ids = self.tokens[index].masked_fill(attention_mask == 0, PAD)
        labels = input_ids.masked_fill(attention_mask == 0, -100)
        return {
            "input_ids": input_ids,
            "attention_mask": attention_mask,
            "labels": labels,
        }


def make_datasets():
    return Sentences(256, seed=0), Sentences(64, seed=1)


def make_loader(dataset, batch_size, rank, world_size, shuffle):
    sampler = DistributedSampler(dataset, world_size, rank, shuffle=shuffle)
    return DataLoader(dataset, batch_size, sampler=sampler, drop_last=shuffle)


def make_model(dtype=torch.float32, model_name_or_path=None):
    """Return a small GPT-2 without dropout, or the model of a folder."""
    if model_name_or_path:
        model = GPT2LMHeadModel.from_pretrained(model_name_or_path)
    else:
        config = GPT2Config(
            vocab_size=VOCAB_SIZE,
            n_positions=MAX_LENGTH,
            n_embd=32,
            n_layer=4,
            n_head=4,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            bos_token_id=PAD,
            eos_token_id=PAD,
            use_cache=False,
        )
        model = GPT2LMHeadModel(config)
    return model.to(dtype)


def evaluate(model, loader):
    """Return the mean loss of all ranks' batches."""
    model.eval()
    sums = torch.zeros(2, dtype=torch.float64)
    for batch in loader:
        with torch.no_grad():
            outputs = model(**batch)
        sums += torch.tensor([outputs.loss.item(), 1.0])
    dist.all_reduce(sums)
    model.train()
    return (sums[0] / sums[1]).item()


def parse_args(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--model-name-or-path", help="folder of a model; none: a new one"
    )
    parser.add_argument(
        "--output-dir", default="gpt2", help="folder of the trained model"
    )
    parser.add_argument("--num-train-epochs", type=int, default=4)
    parser.add_argument("--per-device-batch-size", type=int, default=16)
    parser.add_argument("--learning-rate", type=float, default=1e-2)
    parser.add_argument("--weight-decay", type=float, default=0.01)
    parser.add_argument("--num-warmup-steps", type=int, default=4)
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--dtype", default="float32", help="type of the weights")
    return parser.parse_args(arguments)


def main(args):
    dist.init_process_group("gloo")
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    set_seed(args.seed)
    train_set, eval_set = make_datasets()
    batch_size = args.per_device_batch_size
    train_loader = make_loader(train_set, batch_size, rank, world_size, shuffle=True)
    eval_loader = make_loader(eval_set, batch_size, rank, world_size, shuffle=False)

    model = make_model(getattr(torch, args.dtype), args.model_name_or_path)
    optimizer = AdamW(
        model.parameters(), lr=args.learning_rate, weight_decay=args.weight_decay
    )
    n_steps = args.num_train_epochs * len(train_loader)
    scheduler = get_linear_schedule_with_warmup(
        optimizer, args.num_warmup_steps, n_steps
    )
    model = DDP(model)

    model.train()
    for epoch in range(args.num_train_epochs):
        train_loader.sampler.set_epoch(epoch)
        total = 0.0
        for batch in train_loader:
            outputs = model(**batch)
            loss = outputs.loss
            loss.backward()
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            total += loss.item()
        eval_loss = evaluate(model, eval_loader)
        if rank == 0:
            print(
                f"epoch {epoch}: train loss {total / len(train_loader):.4f},"
                f" eval loss {eval_loss:.4f}, perplexity {math.exp(eval_loss):.2f}"
            )

    if rank == 0:
        model.module.save_pretrained(args.output_dir)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(parse_args())
