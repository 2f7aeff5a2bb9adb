"""Layer-wise learning rate decay equals one parameter group per parameter by the rule of BEiT."""

import copy

import pytest
import torch
from transformers import BertConfig, BertForSequenceClassification

from lmmods.core.errors import UserError
from lmmods.core.settings import Optimizer
from lmmods.torch_engine.nn.optim import build_optimizer, build_schedule, recipe_lr

CONFIG = BertConfig(vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=3, num_attention_heads=2)
IDS = torch.arange(12).view(2, 6)


def compute_scale(name: str, decay: float, layers: int) -> float:
    """Return the scale of BEiT's `get_num_layer_for_vit`: d^(n + 1 - index), with block indices from 1."""
    if name.startswith("bert.embeddings."):
        index = 0
    elif name.startswith("bert.encoder.layer."):
        index = int(name.split(".")[3]) + 1
    else:
        index = layers + 1
    return decay ** (layers + 1 - index)


@pytest.mark.parametrize(("rule", "trained"), [("adamw", ""), ("adamw", "layer.0"), ("sgd", "")], ids=str)
def test_layer_decay_equals_one_parameter_group_per_parameter(rule, trained):
    """Frozen layers count as layers."""
    torch.manual_seed(0)
    model = BertForSequenceClassification(CONFIG)
    model.eval()
    for name, param in model.named_parameters():
        param.requires_grad_(trained in name)
    reference = copy.deepcopy(model)
    settings = Optimizer(name=rule, lr=1e-2, weight_decay=0.1, layer_decay=0.7, schedule="cosine", warmup=2)
    layer_optimizer = build_optimizer(model.named_parameters(), settings)
    groups = [{"params": [param], "lr": 1e-2 * compute_scale(name, 0.7, 3),
               "weight_decay": 0.1 if param.ndim > 1 else 0.0}
              for name, param in reference.named_parameters() if param.requires_grad]
    reference_optimizer = torch.optim.AdamW(groups, fused=True) if rule == "adamw" else torch.optim.SGD(groups)
    schedules = [build_schedule(optimizer, settings, 5) for optimizer in (layer_optimizer, reference_optimizer)]
    for step in range(5):
        assert recipe_lr(layer_optimizer, settings) == pytest.approx(settings.lr_at(step, 5), rel=1e-12)
        for network, optimizer, schedule in ((model, layer_optimizer, schedules[0]),
                                             (reference, reference_optimizer, schedules[1])):
            network(input_ids=IDS, labels=torch.tensor([0, 1])).loss.backward()
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
    named, start = dict(reference.named_parameters()), BertForSequenceClassification(CONFIG).state_dict()
    assert all(torch.equal(param, named[name]) for name, param in model.named_parameters())
    assert any(not torch.equal(param, start[name]) for name, param in model.named_parameters())


@pytest.mark.parametrize("value", [0.0, 1.1, float("nan")])
def test_a_layer_decay_out_of_range_is_rejected(value):
    with pytest.raises(UserError, match="optimizer.layer_decay is .*, but must be more than 0 and at most 1"):
        Optimizer(layer_decay=value)
