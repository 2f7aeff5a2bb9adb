"""Schedules against those of transformers, and settings that are rejected."""

import pytest
import torch
import transformers

from lmmods.core.errors import UserError
from lmmods.core.settings import Generation, LoRA, Optimizer, TokenLoss
from lmmods.recipe.tasks.sft import SFTFields


def transformers_rates(name: str, warmup: int, steps: int) -> list[float]:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.3)
    schedule = transformers.get_scheduler(name, optimizer, num_warmup_steps=warmup, num_training_steps=steps)
    rates = []
    for _ in range(steps):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    return rates


@pytest.mark.parametrize("warmup", [0, 1, 7, 0.1])
@pytest.mark.parametrize(("schedule", "name"), [("linear", "linear"), ("cosine", "cosine"),
                                                ("constant", "constant_with_warmup")])
def test_a_schedule_equals_that_of_transformers(schedule, name, warmup):
    settings = Optimizer(lr=0.3, schedule=schedule, warmup=warmup)
    rates = [settings.lr_at(step, 40) for step in range(40)]
    assert rates == pytest.approx(transformers_rates(name, 4 if warmup == 0.1 else warmup, 40), abs=1e-12)


def test_wsd_is_constant_and_then_decays_in_its_last_part():
    settings = Optimizer(lr=1.0, schedule="wsd", warmup=2, decay=0.2, min_lr_ratio=0.1)
    rates = [settings.lr_at(step, 20) for step in range(21)]
    assert rates[:3] == [0.0, 0.5, 1.0]
    assert rates[3:17] == [1.0] * 14
    assert rates[17:] == pytest.approx([0.775, 0.55, 0.325, 0.1])


def test_lr_zero_and_warmup_zero_are_honoured():
    assert Optimizer(lr=0.0).lr_at(5, 10) == 0.0
    assert Optimizer(lr=0.5, warmup=0).lr_at(0, 10) == 0.5


@pytest.mark.parametrize(("make", "key"), [
    (lambda: Optimizer(lr=-1), "optimizer.lr"),
    (lambda: Optimizer(warmup=1.5), "optimizer.warmup"),
    (lambda: Optimizer(betas=[0.9]), "optimizer.betas"),
    (lambda: Optimizer(name="sgd_8bit"), "optimizer.momentum"),
    (lambda: LoRA(rank=0), "lora.rank"),
    (lambda: LoRA(dropout=1.0), "lora.dropout"),
    (lambda: Generation(max_new_tokens=0), "generation.max_new_tokens"),
    (lambda: Generation(temperature=0.7), "generation.temperature"),
    (lambda: Optimizer(lr=None), "optimizer.lr is null"),
    (lambda: Optimizer(betas=None), "optimizer.betas is null"),
    (lambda: LoRA(rank=None), "lora.rank is null"),
    (lambda: Generation(max_new_tokens=None), "generation.max_new_tokens is null"),
])
def test_impossible_settings_are_rejected_by_name(make, key):
    with pytest.raises(UserError, match=key):
        make()


def test_dft_cannot_be_combined_with_label_smoothing():
    assert SFTFields(pretrained="x", dft=True, z_loss=1e-4).token_loss == TokenLoss(0.0, 1e-4, dft=True)
    with pytest.raises(UserError, match="model.label_smoothing is 0.1, but must be 0 with model.dft"):
        SFTFields(pretrained="x", dft=True, label_smoothing=0.1)
