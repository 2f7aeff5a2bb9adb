"""Parameter averages equal those of torch.optim.swa_utils."""

import copy

import pytest
import torch
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from lmmods.core.errors import UserError
from lmmods.core.settings import Optimizer
from lmmods.recipe.tasks.grpo import GRPOFields
from lmmods.torch_engine.nn.optim import AVERAGE, averages, build_optimizer


def network():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Tanh(), torch.nn.Linear(7, 3))


def step(model, optimizer, index):
    rows = torch.randn(4, 5, generator=torch.Generator().manual_seed(index))
    model(rows.to(model[0].weight.dtype)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("rule", ["adamw", "adafactor", "sgd", "muon"])
def test_averages_equal_torch(rule):
    settings = Optimizer(name=rule, lr=0.1, ema_decay=0.8)
    model = network()
    optimizer = build_optimizer(model.named_parameters(), settings)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.8))
    for index in range(6):
        step(model, optimizer, index)
        average.update_parameters(model)
    current = [param.detach().clone() for param in model.parameters()]
    with averages(optimizer):
        averaged = [param.detach().clone() for param in model.parameters()]
    assert all(map(torch.equal, averaged, average.module.parameters()))
    assert not any(map(torch.equal, averaged, current)) and all(map(torch.equal, current, model.parameters()))


def test_averages_resume_with_the_same_bits():
    """They stay float32 with 16-bit parameters, although torch casts loaded states to the parameter's dtype."""
    settings = Optimizer(lr=0.01, ema_decay=0.9)
    model = network().bfloat16()
    optimizer = build_optimizer(model.named_parameters(), settings)
    for index in range(3):
        step(model, optimizer, index)
    copied, state = copy.deepcopy(model), copy.deepcopy(optimizer.state_dict())
    resumed = build_optimizer(copied.named_parameters(), settings)
    resumed.load_state_dict(state)
    for trained, trained_optimizer in ((model, optimizer), (copied, resumed)):
        step(trained, trained_optimizer, 3)
    for first, second in zip(model.parameters(), copied.parameters(), strict=True):
        average = optimizer.state[first][AVERAGE]
        assert average.dtype == torch.float32 and torch.equal(average, resumed.state[second][AVERAGE])


def test_a_parameter_gets_its_average_with_its_first_gradient():
    model = network()
    optimizer = build_optimizer(model.named_parameters(), Optimizer(ema_decay=0.9))
    model[2](torch.ones(7)).sum().backward()
    optimizer.step()
    step(model, optimizer, 0)
    assert AVERAGE in optimizer.state[model[0].weight]


@pytest.mark.parametrize(("changes", "message"), [
    ({"ema_decay": 1.0}, "optimizer.ema_decay is 1.0, but must be null, or more than 0 and less than 1"),
    ({"ema_decay": 0.9, "name": "adamw_8bit"}, "must be null with optimizer.name adamw_8bit")])
def test_invalid_ema_decay_is_rejected(changes, message):
    with pytest.raises(UserError, match=message):
        Optimizer(**changes)


def test_grpo_rejects_parameter_averages():
    settings = {"pretrained": "x", "rewards": [{"name": "exact_match"}]}
    GRPOFields(**settings)
    with pytest.raises(UserError, match="model.optimizer.ema_decay is 0.9, but must be null for GRPO"):
        GRPOFields(**settings, optimizer=Optimizer(ema_decay=0.9))
