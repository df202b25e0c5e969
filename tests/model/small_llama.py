"""Small Llamas, written out and of transformers, with the plan of torch's tutorial.

https://docs.pytorch.org/tutorials/intermediate/TP_tutorial.html
"""

import copy
import importlib.util

import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn import functional as F

from tests.thorough import THOROUGH
from toolkit.errors import UserError
from toolkit.model import partition
from toolkit.model.loss_parallel import LossParallel
from toolkit.runtime import Distributed, SingleProcess, StepOptions, join
from toolkit.schedule import catalog

WORDS, TOKENS, HIDDEN, HEADS, SHARED_HEADS = 11, 6, 16, 4, 2
HEAD_SIZE = HIDDEN // HEADS


class Attention(nn.Module):
    """Grouped queries, with rotary places."""

    def __init__(self):
        super().__init__()
        self.wq = nn.Linear(HIDDEN, HEADS * HEAD_SIZE, bias=False)
        self.wk = nn.Linear(HIDDEN, SHARED_HEADS * HEAD_SIZE, bias=False)
        self.wv = nn.Linear(HIDDEN, SHARED_HEADS * HEAD_SIZE, bias=False)
        self.wo = nn.Linear(HEADS * HEAD_SIZE, HIDDEN, bias=False)
        angles = torch.arange(TOKENS)[:, None] * 100.0 ** -torch.arange(HEAD_SIZE // 2)
        self.register_buffer("cosines", torch.cos(torch.cat([angles, angles], -1)))
        self.register_buffer("sines", torch.sin(torch.cat([angles, angles], -1)))

    def _turned(self, x):
        first, second = x.chunk(2, -1)
        return x * self.cosines + torch.cat([-second, first], -1) * self.sines

    def forward(self, x):
        # As many heads as this device has.
        queries = self.wq(x).unflatten(-1, (-1, HEAD_SIZE)).transpose(1, 2)
        keys = self.wk(x).unflatten(-1, (-1, HEAD_SIZE)).transpose(1, 2)
        values = self.wv(x).unflatten(-1, (-1, HEAD_SIZE)).transpose(1, 2)
        attended = F.scaled_dot_product_attention(
            self._turned(queries),
            self._turned(keys),
            values,
            is_causal=True,
            enable_gqa=True,
        )
        return self.wo(attended.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    def __init__(self):
        super().__init__()
        self.w1 = nn.Linear(HIDDEN, 24, bias=False)
        self.w2 = nn.Linear(24, HIDDEN, bias=False)
        self.w3 = nn.Linear(HIDDEN, 24, bias=False)

    def forward(self, x):
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = Attention()
        self.feed_forward = FeedForward()
        self.attention_norm = nn.RMSNorm(HIDDEN)
        self.ffn_norm = nn.RMSNorm(HIDDEN)

    def forward(self, x):
        x = x + self.attention(self.attention_norm(x))
        return x + self.feed_forward(self.ffn_norm(x))


class Llama(nn.Module):
    def __init__(self):
        super().__init__()
        self.tok_embeddings = nn.Embedding(WORDS, HIDDEN)
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.norm = nn.RMSNorm(HIDDEN)
        self.output = nn.Linear(HIDDEN, WORDS, bias=False)

    def forward(self, tokens):
        x = self.tok_embeddings(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.output(self.norm(x))


def shard_own_modules(stage, mesh, plan):
    """Shard the modules of a plan for the whole model that this stage has."""
    names = {name for name, _ in stage.named_modules()}
    parallelize_module(
        stage, mesh, {name: plan[name] for name in plan if name in names}
    )


def parallelize(stage, mesh, output=None):
    """Shard the modules of a stage by the tutorial's plan; names are those of the whole model."""
    plan = {
        "tok_embeddings": RowwiseParallel(input_layouts=Replicate()),
        "output": output or ColwiseParallel(output_layouts=Replicate()),
    }
    for layer in ("layers.0", "layers.1"):
        plan |= {
            f"{layer}.attention.wq": ColwiseParallel(),
            f"{layer}.attention.wk": ColwiseParallel(),
            f"{layer}.attention.wv": ColwiseParallel(),
            f"{layer}.attention.wo": RowwiseParallel(),
            f"{layer}.feed_forward.w1": ColwiseParallel(),
            f"{layer}.feed_forward.w2": RowwiseParallel(),
            f"{layer}.feed_forward.w3": ColwiseParallel(),
        }
    shard_own_modules(stage, mesh, plan)


def parallelize_loss(stage, mesh):
    """As the tutorial's section on loss parallelism."""
    by_words = ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)
    parallelize(stage, mesh, by_words)


def of_transformers():
    """The class that users take, with groups of queries, as torch.export traces it."""
    import transformers

    config = transformers.LlamaConfig(
        hidden_size=HIDDEN,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=HEADS,
        num_key_value_heads=SHARED_HEADS,
        vocab_size=WORDS,
        max_position_embeddings=TOKENS,
        bos_token_id=0,
        eos_token_id=0,
        use_cache=False,
    )
    return transformers.LlamaForCausalLM(config)


def parallelize_transformers(stage, mesh):
    """The same plan by the names that transformers gives."""
    plan = {
        "model.embed_tokens": RowwiseParallel(input_layouts=Replicate()),
        "lm_head": ColwiseParallel(output_layouts=Replicate()),
    }
    for layer in ("model.layers.0", "model.layers.1"):
        plan |= {
            f"{layer}.self_attn.q_proj": ColwiseParallel(),
            f"{layer}.self_attn.k_proj": ColwiseParallel(),
            f"{layer}.self_attn.v_proj": ColwiseParallel(),
            f"{layer}.self_attn.o_proj": RowwiseParallel(),
            f"{layer}.mlp.gate_proj": ColwiseParallel(),
            f"{layer}.mlp.up_proj": ColwiseParallel(),
            f"{layer}.mlp.down_proj": RowwiseParallel(),
        }
    shard_own_modules(stage, mesh, plan)


def token_loss(scores, tokens):
    # The model of transformers returns its scores by name.
    scores = getattr(scores, "logits", scores)
    return F.cross_entropy(scores.flatten(0, 1), tokens.flatten())


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=0.01)


CASES = {
    "CDP-v2, loss parallel": (catalog.cyclic(2), Llama, LossParallel(parallelize_loss)),
}
if importlib.util.find_spec("transformers"):
    CASES["CDP-v2, transformers"] = (
        catalog.cyclic(2),
        of_transformers,
        parallelize_transformers,
    )
if THOROUGH:
    CASES["1F1B"] = catalog.one_f_one_b(2, 4), Llama, parallelize


def trained(name, runtime, **options):
    """A runtime that has trained three steps of a case."""
    schedule, make, plan = CASES[name]
    torch.manual_seed(0)
    model = make().double()
    tokens = torch.randint(WORDS, (2 * schedule.n_microbatches, TOKENS + 1))
    if runtime is Distributed:
        options |= {"width": 2, "parallelize": plan}
    made = runtime(
        partition(model, schedule.n_stages, tokens[:2, :-1]),
        schedule,
        adamw,
        token_loss,
        options=StepOptions(clip=0.1),
        **options,
    )
    losses = []
    for result in made.run([(tokens[:, :-1], tokens[:, 1:])] * 3):
        losses.append(result.losses)
    return made, losses


def parallelize_q_alone(stage, mesh):
    """Keys and values keep all heads."""
    parallelize_module(stage, mesh, {"layers.0.attention.wq": ColwiseParallel()})


def parallelize_scores(stage, mesh):
    """Each device has the scores of some words, as the plan for a loss that takes shards."""
    parallelize(stage, mesh, ColwiseParallel())


def refused_plans():
    """What is said of each plan that would go wrong, or fail within torch."""
    world = join(device="cpu")
    errors = {}
    for name, plan in (
        ("q alone", parallelize_q_alone),
        ("scores", parallelize_scores),
    ):
        CASES[name] = catalog.data_parallel(1), Llama, plan
        try:
            trained(name, Distributed, world=world)
        except UserError as error:
            errors[name] = str(error)
    return errors


def on_devices():
    """Final weights and losses of each case, on 2 ranks of 2 devices."""
    world = join(device="cpu")
    found = {}
    for name in CASES:
        runtime, losses = trained(name, Distributed, world=world)
        found[name] = copy.deepcopy(runtime.module().state_dict()), losses
    return found


def in_one_process(name):
    runtime, losses = trained(name, SingleProcess)
    return runtime.module().state_dict(), losses
