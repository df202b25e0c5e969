"""Language models of Hugging Face, with their loss and tied weights, compute alike in stages."""

import pytest
import torch

from tests.thorough import more
from toolkit.model import partition
from toolkit.model.structure import tensors_of

transformers = pytest.importorskip("transformers")
SIZES = {"vocab_size": 23, "max_position_embeddings": 16, "use_cache": False}


def gpt2(**options):
    config = transformers.GPT2Config(
        n_embd=16,
        n_layer=2,
        n_head=2,
        n_positions=16,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=0,
        **SIZES,
        **options,
    )
    return transformers.GPT2LMHeadModel(config)


def llama(**options):
    config = transformers.LlamaConfig(
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        bos_token_id=0,
        eos_token_id=0,
        **SIZES,
        **options,
    )
    return transformers.LlamaForCausalLM(config)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("make", more([llama], [gpt2, llama]))
def test_loss_and_gradients(make, tied):
    torch.manual_seed(0)
    model = make(tie_word_embeddings=tied).double().train()
    ids = torch.randint(23, (3, 8))
    example = {"input_ids": ids[:2], "labels": ids[:2]}
    stages = partition(model, 2, example)
    values = tensors_of({"input_ids": ids, "labels": ids})
    for stage in stages:
        values = stage(*values)
    found = stages.results.restore(values)
    assert found.loss.shape == ()
    found.loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad()
    expected = model(input_ids=ids, labels=ids)
    expected.loss.backward()
    torch.testing.assert_close(found.logits, expected.logits, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(found.loss, expected.loss, rtol=1e-10, atol=1e-12)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(
            gradients[name], parameter.grad, rtol=1e-10, atol=1e-12
        )
    n_parameters = [sum(p.numel() for p in stage.parameters()) for stage in stages]
    assert sum(n_parameters) == sum(p.numel() for p in model.parameters())
    assert all(n_parameters)
    crossing = [
        boundary.name for boundary in stages.boundaries[1] if not boundary.batched
    ]
    assert len(crossing) == tied
