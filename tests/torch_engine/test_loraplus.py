"""LoRA+ equals PEFT's optimiser."""

import copy

import peft
import pytest
import torch
from peft.optimizers import create_loraplus_optimizer
from transformers import LlamaConfig, LlamaForCausalLM

from lmmods.core.errors import UserError
from lmmods.core.settings import LoRA, Optimizer
from lmmods.recipe.tasks.base import TaskFields
from lmmods.torch_engine.nn.optim import build_optimizer

CONFIG = LlamaConfig(vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2)
IDS = torch.arange(12).view(2, 6)


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_steps_equal_peft(decay):
    torch.manual_seed(0)
    model = peft.get_peft_model(LlamaForCausalLM(CONFIG), peft.LoraConfig(
        r=4, target_modules="all-linear", modules_to_save=["lm_head"]))
    reference = copy.deepcopy(model)
    loraplus = build_optimizer(model.named_parameters(), Optimizer(lr=1e-2, b_lr_ratio=16.0, weight_decay=decay))
    reference_optimizer = create_loraplus_optimizer(reference, torch.optim.AdamW, lr=1e-2, loraplus_lr_ratio=16.0,
                                                    loraplus_weight_decay=decay, fused=True)
    for _ in range(4):
        for network, optimizer in ((model, loraplus), (reference, reference_optimizer)):
            network(input_ids=IDS, labels=IDS).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    named = dict(reference.named_parameters())
    trained = {name for name, param in model.named_parameters() if param.requires_grad}
    assert len(trained) == 29 and all(torch.equal(param, named[name]) for name, param in model.named_parameters())
    assert {group["lr"] for group in loraplus.param_groups} == {1e-2, 0.16}


def test_b_lr_ratio_requires_an_adapter():
    optimizer = Optimizer(b_lr_ratio=4.0)
    with pytest.raises(UserError, match="model.optimizer.b_lr_ratio is 4.0, but must be 1 without model.lora"):
        TaskFields(pretrained="x", optimizer=optimizer)
    TaskFields(pretrained="x", optimizer=optimizer, lora=LoRA())
    TaskFields(pretrained="x", optimizer=optimizer, adapter="y")
    with pytest.raises(UserError, match="optimizer.b_lr_ratio is 0.0, but must be more than 0"):
        Optimizer(b_lr_ratio=0.0)
