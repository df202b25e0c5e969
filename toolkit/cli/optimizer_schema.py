"""The options of how weights are updated: optimizers and learning rates."""

from dataclasses import dataclass

from toolkit.cli.model_schema import option, option_list


@dataclass
class SGD:
    _target_: str = "torch.optim.SGD"
    lr: float = 0.1
    momentum: float = 0.9
    weight_decay: float = 1e-4
    nesterov: bool = False


@dataclass
class AdamW:
    _target_: str = "torch.optim.AdamW"
    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 1e-2


@dataclass
class NAdam:
    _target_: str = "torch.optim.NAdam"
    lr: float = 1e-3
    betas: tuple[float, float] = option((0.99, 0.999), "the first of arXiv 2505.01099, for delays")
    eps: float = 1e-8
    weight_decay: float = 1e-2
    momentum_decay: float = 4e-3
    decoupled_weight_decay: bool = option(True, "weight decay as in AdamW")


@dataclass
class MuonOptimizer:
    _target_: str = "toolkit.training.optimizers.muon"
    lr: float = 1e-3
    momentum: float = 0.95
    nesterov: bool = True
    ns_steps: int = option(5, "of Newton and Schulz, towards an orthogonal update")
    adamw: list[str] = option_list(
        ["embed", "head", "fc", r"^conv1\.", r"^conv_proj\."],
        "patterns of the names of matrices that AdamW updates",
    )
    betas: tuple[float, float] = option((0.9, 0.95), "of AdamW")
    eps: float = option(1e-8, "of AdamW")
    weight_decay: float = 1e-2


@dataclass
class LARS:
    """timm's; arXiv 1708.03888."""

    _target_: str = "toolkit.training.optimizers.lars"
    lr: float = 1.0
    momentum: float = 0.9
    dampening: float = 0.0
    weight_decay: float = 1e-4
    nesterov: bool = False
    trust_coeff: float = option(1e-3, "eta: the rate of a tensor is eta |w| / (|g| + decay |w|)")
    eps: float = option(1e-8, "added to that denominator")
    trust_clip: bool = option(False, "LARC: never more than optimizer.lr")
    always_adapt: bool = option(False, "adapt without weight decay, too")


@dataclass
class LAMB:
    """timm's; arXiv 1904.00962."""

    _target_: str = "toolkit.training.optimizers.lamb"
    lr: float = 1e-3
    bias_correction: bool = True
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-6
    weight_decay: float = 1e-2
    grad_averaging: bool = option(True, "weigh a gradient by 1 - beta_1 in its average")
    max_grad_norm: float | None = option(None, "clips each stage's gradient; the option clip tells")
    trust_clip: bool = option(False, "LAMBC: a trust ratio is 1 at most")
    always_adapt: bool = option(False, "adapt without weight decay, too")
    decoupled_decay: bool = option(False, "weight decay as in AdamW")


@dataclass
class ConstantRate:
    _target_: str = "toolkit.training.lr.Constant"
    warmup_epochs: float = option(0.0, "epochs in which the rate rises to optimizer.lr")
    reference_batch: int | None = option(None, "samples a step that optimizer.lr is meant for")


@dataclass
class StepRate(ConstantRate):
    _target_: str = "toolkit.training.lr.Step"
    every_epochs: int = option(30, "epochs from one fall of the rate to the next")
    gamma: float = option(0.1, "factor of each fall")


@dataclass
class CosineRate(ConstantRate):
    _target_: str = "toolkit.training.lr.Cosine"
    final: float = option(0.0, "share of optimizer.lr at the end")
