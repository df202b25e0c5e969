"""A Llama as users write it, with the plan of torch's tutorial, on ranks of two devices."""

import pytest
import torch
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import PrepareModuleInput, parallelize_module

from tests.model import small_llama
from tests.runtime.models import assert_same
from toolkit.errors import UserError
from toolkit.model import partition
from toolkit.model.node_costs import meta_copy
from toolkit.model.sharded_module import parallelized
from toolkit.model.sharded_work import mesh_without_messages
from toolkit.runtime import launch


def test_refuses_a_plan_for_modules_that_a_stage_does_not_call():
    """Their hooks would never run: of modules that contain others, and after torch.export."""
    model = small_llama.Llama()
    (stage,) = partition(model, 1, torch.zeros(2, small_llama.TOKENS, dtype=torch.long))

    def shares_inputs(stage, mesh):
        style = PrepareModuleInput(
            input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)
        )
        parallelize_module(stage, mesh, {"layers.0.attention": style})

    with mesh_without_messages(2) as mesh:
        sharded = parallelized(meta_copy(stage), mesh, small_llama.parallelize)
        assert isinstance(sharded.get_parameter("output.weight"), DTensor)
        with pytest.raises(UserError, match=r"layers\.0\.attention\b"):
            parallelized(meta_copy(stage), mesh, shares_inputs)


def test_refuses_a_plan_for_tied_weights_that_torch_export_has_traced():
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "num_attention_heads": 2, "num_key_value_heads": 2}
    config = transformers.LlamaConfig(
        **sizes,
        intermediate_size=8,
        num_hidden_layers=1,
        vocab_size=11,
        use_cache=False,
        tie_word_embeddings=True,
    )
    model = transformers.LlamaForCausalLM(config)
    (stage,) = partition(model, 1, {"input_ids": torch.zeros(2, 4, dtype=torch.long)})
    with (
        mesh_without_messages(2) as mesh,
        pytest.raises(UserError, match=r"model\.embed_tokens"),
    ):
        parallelized(meta_copy(stage), mesh, small_llama.parallelize_transformers)


def test_refuses_plans_that_do_not_fit():
    """A loss of local scores as if they were all would train wrongly, and say nothing."""
    for device, errors in enumerate(launch(small_llama.refused_plans, 2)):
        assert "stage 0" in errors["q alone"]
        # The second device has the smaller half of eleven words.
        assert f"[2, 6, {6 - device}]" in errors["scores"]
        assert "[2, 6, 11]" in errors["scores"]


@pytest.fixture(scope="module")
def on_devices():
    return launch(small_llama.on_devices, 4)


@pytest.mark.parametrize("name", small_llama.CASES)
def test_follows_the_single_process(on_devices, name):
    expected, expected_losses = small_llama.in_one_process(name)
    for found in on_devices:
        state, _ = found[name]
        assert_same(state, expected)
    for step, losses in enumerate(expected_losses):
        # Each sample's loss is on one rank or on every one; all devices of a rank have it.
        in_column = [found[name][1][step] for found in on_devices[::2]]
        merged = torch.cat([loss for loss in in_column if len(loss)]).sort().values
        torch.testing.assert_close(merged, losses.sort().values, rtol=0, atol=1e-10)
