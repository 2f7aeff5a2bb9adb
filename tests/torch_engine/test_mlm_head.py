"""Loss and gradients of masked positions equal transformers' loss over full logits, for many architectures."""

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForMaskedLM

from lmmods.torch_engine.nn import loss as loss_module
from lmmods.torch_engine.tasks.mlm import MLMHead, masked_loss
from tests.closeness import assert_as_close, gradients, in_both

SMALL = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
         "num_attention_heads": 4, "max_position_embeddings": 40, "hidden_dropout_prob": 0.0,
         "attention_probs_dropout_prob": 0.0}
ARCHITECTURES = {
    "bert": SMALL, "roberta": SMALL, "albert": {**SMALL, "embedding_size": 16}, "electra": {**SMALL,
                                                                                        "embedding_size": 16},
    "deberta-v2": {**SMALL, "relative_attention": True, "pos_att_type": ["p2c", "c2p"]},
    "distilbert": {"vocab_size": 61, "dim": 32, "hidden_dim": 48, "n_layers": 2, "n_heads": 4, "dropout": 0.0,
                   "attention_dropout": 0.0, "max_position_embeddings": 40},
}


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_loss_and_gradients_equal_full_logits(name, monkeypatch):
    monkeypatch.setattr(loss_module, "CHUNK_BYTES", 61 * 4 * 2)  # two positions per chunk
    monkeypatch.setattr(loss_module, "MIN_CHUNK", 1)
    torch.manual_seed(0)
    model = AutoModelForMaskedLM.from_config(CONFIG_MAPPING[name](**ARCHITECTURES[name], pad_token_id=1)).train()
    ids = torch.randint(5, 61, (2, 12))
    mask = torch.ones_like(ids)
    mask[1, 8:], ids[1, 8:] = 0, 1
    labels = torch.full_like(ids, -100)
    labels[0, [1, 5, 7]], labels[1, [0, 2]] = ids[0, [1, 5, 7]], ids[1, [0, 2]]
    labels[0, 1] = 0  # token 0 is a valid target
    batch = {"input_ids": ids, "attention_mask": mask, "labels": labels}

    def whole(model):
        total = model(**batch).loss * 5
        return total.detach(), gradients(model, total)

    (total, expected), (exact_total, exact) = in_both(whole, model)
    sums = masked_loss(MLMHead(model), batch, True)
    assert sums.weight.item() == 5 and 0 <= sums.correct.item() <= 5
    assert_as_close(sums.total, total, exact_total)
    assert_as_close(gradients(model, sums.total), expected, exact)
