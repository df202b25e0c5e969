"""Our models' plans: devices that share stages train as a single process does."""

import pytest
from torch import nn

from tests.model import shared_models
from tests.runtime.models import assert_same
from toolkit.errors import UserError
from toolkit.model import gpt
from toolkit.model.tensor_parallel import tensor_parallel
from toolkit.runtime import launch


@pytest.fixture(scope="module")
def on_devices():
    return launch(shared_models.on_devices, 4)


@pytest.mark.parametrize("case", shared_models.CASES, ids=" ".join)
def test_follows_the_single_process(on_devices, case):
    expected = shared_models.in_one_process(case)
    n_elements = sum(tensor.numel() for tensor in expected.values())
    for found in on_devices:
        n_on_device, state = found[case]
        assert_same(state, expected)
        assert n_on_device < 0.75 * n_elements


class OtherAttention(nn.Module):
    def __init__(self, heads, dropout):
        super().__init__()
        self.attention = nn.MultiheadAttention(8, heads, dropout)


VisionTransformer = type("VisionTransformer", (OtherAttention,), {})


@pytest.mark.parametrize(
    ("model", "width", "words"),
    [
        (nn.Linear(2, 2), 2, "Linear"),
        (gpt(7, 4, layers=1, width=6, heads=3), 2, "model.heads, 3"),
        (gpt(7, 3, layers=1, width=8, heads=2), 2, "sequences, 3"),
        (VisionTransformer(2, 0.0), 4, "heads, 2"),
        (VisionTransformer(2, 0.1), 2, "attention_dropout=0.1"),
    ],
    ids=["no plan", "heads", "length", "heads of ViT", "dropout of ViT"],
)
def test_refuses_what_devices_cannot_share(model, width, words):
    with pytest.raises(UserError, match=words):
        tensor_parallel(model, width)
