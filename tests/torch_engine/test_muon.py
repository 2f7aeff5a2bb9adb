"""Muon equals torch.optim's Muon and AdamW, and its iterations follow the singular values."""

import copy

import numpy as np
import pytest
import torch

from lmmods.core.settings import NS_COEFFICIENTS, Optimizer
from lmmods.torch_engine.nn.optim import build_optimizer, build_schedule, follow_recipe, group_settings, orthogonalize
from tests.closeness import Float64

SHAPES = {"embed_tokens.weight": (11, 6), "layers.0.up.weight": (9, 6), "layers.0.up.bias": (9,),
          "layers.1.down.weight": (6, 9), "lm_head.weight": (11, 6)}
MATRICES = ("layers.0.up.weight", "layers.1.down.weight")


def make_parameters(seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtype))
            for name, shape in SHAPES.items()}


def set_gradients(params, step):
    for param, gradient in zip(params.values(), make_parameters(step + 1).values(), strict=True):
        param.grad = gradient.detach().to(param.dtype)


@pytest.mark.parametrize(("options", "dtype"), [
    ({}, torch.float32), ({}, torch.bfloat16), ({"adjust_lr": "original"}, torch.float32),
    ({"nesterov": False, "muon_momentum": 0.8, "ns_steps": 3}, torch.float32)], ids=str)
def test_steps_equal_muon_and_adamw_of_torch(options, dtype):
    """Bit for bit, in bfloat16. Without nesterov, torch divides the momentum of bfloat16 parameters in place."""
    settings = Optimizer(name="muon", lr=1e-2, weight_decay=0.1, betas=[0.8, 0.9], ns_dtype="bfloat16",
                         schedule="linear", **options)
    params = make_parameters(dtype=dtype)
    reference = copy.deepcopy(params)
    optimizer_of_recipe = build_optimizer(params.items(), settings)
    schedule = build_schedule(optimizer_of_recipe, settings, 5)
    muon = torch.optim.Muon([reference[name] for name in MATRICES], weight_decay=0.1, momentum=settings.muon_momentum,
                            nesterov=settings.nesterov, ns_steps=settings.ns_steps, adjust_lr_fn=settings.adjust_lr)
    adamw = torch.optim.AdamW([{"params": [reference["embed_tokens.weight"], reference["lm_head.weight"]]},
                               {"params": [reference["layers.0.up.bias"]], "weight_decay": 0.0}],
                              betas=(0.8, 0.9), weight_decay=0.1, fused=True)
    for step in range(5):
        set_gradients(params, step)
        set_gradients(reference, step)
        for group in (*muon.param_groups, *adamw.param_groups):
            group["lr"] = settings.lr_at(step, 5)
        for optimizer in (optimizer_of_recipe, muon, adamw):
            optimizer.step()
        schedule.step()
        for name, param in params.items():
            assert torch.equal(param, reference[name]), (step, name)


def test_a_loaded_state_resumes_with_the_same_bits():
    settings = Optimizer(name="muon", lr=1e-2, weight_decay=0.1)
    params = make_parameters()
    optimizer = build_optimizer(params.items(), settings)
    for step in range(2):
        set_gradients(params, step)
        optimizer.step()
    copied = copy.deepcopy(params)
    resumed = build_optimizer(copied.items(), settings)
    settings_by_group = group_settings(resumed)
    schedule = build_schedule(resumed, settings, 9)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    follow_recipe(resumed, schedule, settings_by_group)
    for parameters, rule in ((params, optimizer), (copied, resumed)):
        set_gradients(parameters, 2)
        rule.step()
    assert all(torch.equal(param, copied[name]) for name, param in params.items())
    assert {name for state in resumed.state.values() for name in state} == {
        "momentum_buffer", "step", "exp_avg", "exp_avg_sq"}


def test_all_adapter_parameters_are_optimised_as_matrices():
    params = {f"layers.0.q_proj.lora_{side}.default.weight": torch.nn.Parameter(torch.ones(4, 4)) for side in "AB"}
    optimizer = build_optimizer(params.items(), Optimizer(name="muon"))
    for param in params.values():
        param.grad = torch.eye(4)
    optimizer.step()
    assert [len(group["params"]) for group in optimizer.param_groups] == [2]
    assert all((param != 1).any() for param in params.values())


def test_a_step_computes_the_loss_of_its_closure_first():
    param = torch.nn.Parameter(torch.eye(3))
    optimizer = build_optimizer([("layers.0.weight", param)], Optimizer(name="muon", lr=0.1))

    def closure():
        loss = (param * param).sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == 3.0
    assert not torch.equal(param, torch.eye(3))


@pytest.mark.parametrize("shape", [(8, 24), (24, 8), (3, 16, 12)], ids=str)
def test_orthogonalisation_maps_singular_values_by_the_polynomial(shape):
    matrix = np.random.default_rng(0).normal(size=shape)
    u, values, vh = np.linalg.svd(matrix, full_matrices=False)
    values = values / np.linalg.norm(matrix, axis=(-2, -1))[..., None]
    a, b, c = NS_COEFFICIENTS
    for _ in range(5):
        values = a * values + b * values**3 + c * values**5
    with Float64():
        result = orthogonalize(torch.tensor(matrix), 5, torch.float32).numpy()
    assert np.abs(result - (u * values[..., None, :]) @ vh).max() <= 1e-12
    assert 0.5 < values.min() and values.max() < 1.3
