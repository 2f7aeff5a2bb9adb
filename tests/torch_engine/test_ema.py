"""Averages of parameters against torch.optim.swa_utils, and what is evaluated with them."""

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


def step(model, optimizer, number):
    rows = torch.randn(4, 5, generator=torch.Generator().manual_seed(number))
    model(rows.to(model[0].weight.dtype)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("rule", ["adamw", "adafactor", "sgd", "muon"])
def test_averages_are_those_of_torch(rule):
    settings = Optimizer(name=rule, lr=0.1, ema_decay=0.8)
    model = network()
    optimizer = build_optimizer(model.named_parameters(), settings)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.8))
    for number in range(6):
        step(model, optimizer, number)
        average.update_parameters(model)
    moved = [param.detach().clone() for param in model.parameters()]
    with averages(optimizer):
        found = [param.detach().clone() for param in model.parameters()]
    assert all(map(torch.equal, found, average.module.parameters()))
    assert not any(map(torch.equal, found, moved)) and all(map(torch.equal, moved, model.parameters()))


def test_a_loaded_state_goes_on_to_the_bit():
    """In float32 beside parameters of 16 bits, to whose type torch casts what it loads."""
    settings = Optimizer(lr=0.01, ema_decay=0.9)
    model = network().bfloat16()
    optimizer = build_optimizer(model.named_parameters(), settings)
    for number in range(3):
        step(model, optimizer, number)
    again, state = copy.deepcopy(model), copy.deepcopy(optimizer.state_dict())
    resumed = build_optimizer(again.named_parameters(), settings)
    resumed.load_state_dict(state)
    for each, own in ((model, optimizer), (again, resumed)):
        step(each, own, 3)
    for first, second in zip(model.parameters(), again.parameters(), strict=True):
        average = optimizer.state[first][AVERAGE]
        assert average.dtype == torch.float32 and torch.equal(average, resumed.state[second][AVERAGE])


def test_parameters_without_gradient_have_no_average():
    model = network()
    optimizer = build_optimizer(model.named_parameters(), Optimizer(ema_decay=0.9))
    model[2](torch.ones(7)).sum().backward()
    optimizer.step()
    step(model, optimizer, 0)
    assert AVERAGE in optimizer.state[model[0].weight]


@pytest.mark.parametrize(("changes", "message"), [
    ({"ema_decay": 1.0}, "optimizer.ema_decay is 1.0, but must be null, or more than 0 and less than 1"),
    ({"ema_decay": 0.9, "name": "adamw_8bit"}, "must be null with optimizer.name adamw_8bit")])
def test_mistakes(changes, message):
    with pytest.raises(UserError, match=message):
        Optimizer(**changes)


def test_reinforcement_learning_keeps_none():
    settings = {"pretrained": "x", "rewards": [{"name": "exact_match"}]}
    GRPOFields(**settings)
    with pytest.raises(UserError, match="model.optimizer.ema_decay is 0.9, but must be null for GRPO"):
        GRPOFields(**settings, optimizer=Optimizer(ema_decay=0.9))
