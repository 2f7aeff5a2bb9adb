"""Reward models on torch: the gradient equals TRL's RewardTrainer."""

import copy

import pytest
import torch
from transformers import AutoTokenizer, TrainerCallback

from lmmods.torch_engine.nn.classifier import Classifier, reward_loss
from tests.closeness import assert_as_close, gradients, in_both
from tests.torch_engine.test_classifier import PAD, make


@pytest.mark.parametrize("center", [0.0, 0.05])
def test_the_gradient_equals_trl(center, tokenizer_folder, tmp_path):
    pytest.importorskip("trl", reason="an extra of developers (dev)")
    from datasets import Dataset
    from trl import RewardConfig, RewardTrainer

    model = make("llama", "SequenceClassification", num_labels=1)
    rows = [{"chosen_ids": [5, 6, 7, 8, 9], "rejected_ids": [5, 6, 11], "margin": 0.5},
            {"chosen_ids": [12, 13], "rejected_ids": [12, 14, 15, 16], "margin": 0.0},
            {"chosen_ids": [20, 21, 22], "rejected_ids": [20, 23, 24], "margin": 1.5}]
    trl_gradients = {}

    class Probe(TrainerCallback):
        def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
            trl_gradients.update({name: param.grad.clone() for name, param in model.named_parameters()})

    # The rows are tokenised already.
    trainer = type("Tokenised", (RewardTrainer,), {"_prepare_dataset": lambda self, dataset, *_: dataset})
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    tokenizer.pad_token = tokenizer.convert_ids_to_tokens(PAD)
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(2)
    config = RewardConfig(output_dir=str(tmp_path), per_device_train_batch_size=len(rows), report_to=[], max_steps=1,
                          max_grad_norm=0.0, use_cpu=True, bf16=False, gradient_checkpointing=False, disable_tqdm=True,
                          save_strategy="no", center_rewards_coefficient=center or None)
    trainer(model=copy.deepcopy(model), args=config, train_dataset=Dataset.from_list(rows), processing_class=tokenizer,
            callbacks=[Probe()]).train()

    sides = [row[name] for row in rows for name in ("chosen_ids", "rejected_ids")]
    longest = max(map(len, sides))
    batch = {"input_ids": torch.tensor([ids + [PAD] * (longest - len(ids)) for ids in sides]),
             "attention_mask": torch.tensor([[1] * len(ids) + [0] * (longest - len(ids)) for ids in sides])}
    margins = torch.tensor([row["margin"] for row in rows])

    def compute_gradients(network):
        sums = reward_loss(Classifier(network)(batch).view(-1, 2), margins, center)
        return gradients(network, sums.total / sums.weight)

    result, exact = in_both(compute_gradients, model)
    assert result.keys() == trl_gradients.keys() and all(grad.any() for grad in trl_gradients.values())
    assert_as_close(result, trl_gradients, exact, terms=1024)
