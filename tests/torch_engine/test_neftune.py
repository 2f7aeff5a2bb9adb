"""NEFTune noise on torch equals transformers' hook with the same uniform numbers."""

import copy
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import BertConfig, BertModel, GemmaConfig, GemmaForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.integrations.neftune import neftune_post_forward_hook

from lmmods.core import dropout as reference
from lmmods.core.dropout import NOISE_SITE, site_seed, token_seeds
from lmmods.core.errors import UserError
from lmmods.recipe.tasks.base import TaskFields
from lmmods.torch_engine.nn.dropout import TokenDropout, document_lengths, feature_noise

SIZES = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
NETWORKS = {"llama": (LlamaForCausalLM, LlamaConfig(**SIZES)),
            "gemma": (GemmaForCausalLM, GemmaConfig(**SIZES, num_key_value_heads=1, head_dim=8)),
            "bert": (BertModel, BertConfig(**SIZES, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0))}
ALPHA = 5.0


def make_batch(lengths, seed=0):
    longest = max(lengths)
    mask = (torch.arange(longest) < torch.tensor(lengths)[:, None]).long()
    seeds = token_seeds(seed, 0, np.arange(len(lengths))[:, None], np.arange(longest))
    ids = torch.arange(len(lengths) * longest).view(len(lengths), -1) % 32
    return {"input_ids": ids, "attention_mask": mask, "token_seeds": torch.from_numpy(seeds).long() * mask}


def embed(model, batch):
    """Return the output of the embedding in training."""
    outputs = []
    table = model.get_input_embeddings()
    handle = table.register_forward_hook(lambda module, args, x: outputs.append(x.detach()))
    TokenDropout.from_model(model).begin(batch)
    model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"])
    handle.remove()
    return outputs[0]


def make_model(name):
    cls, config = NETWORKS[name]
    torch.manual_seed(0)
    model = cls(config).train()
    TokenDropout(model, noise=ALPHA)
    return model


@pytest.mark.parametrize("num", [1, 5, 64])
def test_noise_has_the_bits_of_the_reference(num):
    seeds = token_seeds(3, 1, np.arange(7), np.arange(7)).astype(np.int32)
    noise = feature_noise(torch.from_numpy(seeds), site_seed("a"), num)
    assert np.array_equal(noise.numpy(), reference.feature_noise(seeds, site_seed("a"), num))


@pytest.mark.parametrize("name", NETWORKS)
def test_noise_equals_transformers(name, monkeypatch):
    """For a row without padding, as transformers scales by the length of the batch."""
    model, batch = make_model(name), make_batch([9])
    noisy = embed(model, batch)
    uniform = reference.feature_noise(batch["token_seeds"].int().numpy(), site_seed(NOISE_SITE), 16)
    monkeypatch.setattr(torch.Tensor, "uniform_", lambda self, low, high: self.copy_(
        low + (high - low) * (torch.from_numpy(uniform) + 1) / 2))
    table = copy.deepcopy(model.get_input_embeddings())
    table._forward_hooks.clear()
    clean = table(batch["input_ids"])
    table.neftune_noise_alpha = ALPHA
    expected = neftune_post_forward_hook(SimpleNamespace(training=True, neftune_noise_alpha=ALPHA), None, clean)
    torch.testing.assert_close(noisy, expected, rtol=0, atol=2e-6 * clean.abs().max().item())
    assert 0.9 * ALPHA / 12 < (noisy - clean).abs().max() <= ALPHA / 12


def test_a_rows_noise_is_independent_of_its_batch_and_only_in_training():
    model, batch = make_model("llama"), make_batch([9, 4, 6])
    whole = embed(model, batch)
    for row, length in enumerate([9, 4, 6]):
        alone = {name: column[row:row + 1, :length] for name, column in batch.items()}
        assert torch.equal(embed(model, alone)[0], whole[row, :length])
    model.eval()
    clean = embed(model, batch)
    noise = whole - clean
    for row, length in enumerate([9, 4, 6]):  # scaled by the row's length, and none in padding
        assert 0.9 < noise[row].abs().max() / (ALPHA / (length * 16) ** 0.5) <= 1 + 1e-5
        assert not noise[row, length:].any()
    model.train()
    with TokenDropout.from_model(model).off():
        assert torch.equal(embed(model, batch), clean)


def test_each_packed_document_has_its_own_length():
    segments = torch.tensor([[1, 1, 1, 2, 2, 0], [1, 2, 2, 2, 2, 3]])
    batch = {"segment_ids": segments, "attention_mask": (segments > 0).long()}
    assert document_lengths(batch).tolist() == [[3, 3, 3, 2, 2, 0], [1, 4, 4, 4, 4, 1]]
    answers = {"attention_mask": torch.tensor([[[1, 1, 0], [0, 1, 1]]])}
    assert document_lengths(answers).tolist() == [[[2, 2, 0], [0, 2, 2]]]


def test_invalid_alpha_and_batches_without_seeds_are_rejected():
    with pytest.raises(UserError, match="model.neftune_alpha is -1, but must be null or more than 0"):
        TaskFields(pretrained="x", neftune_alpha=-1)
    with pytest.raises(UserError, match="model.neftune_alpha: the batches have no token_seeds"):
        TokenDropout.from_model(make_model("llama")).begin({"attention_mask": torch.ones(1, 3)})
