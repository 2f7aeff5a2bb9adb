"""The table of optimisers: each engine's factories, and what the table says of torch's own states."""

import ast
from pathlib import Path

import pytest
import torch

from jax_engine.optim import RULES
from lmmods.core.optimizers import OPTIMIZERS, SHARDABLE
from lmmods.core.settings import Optimizer
from lmmods.torch_engine.nn.optim import FACTORIES, build_optimizer

ROOT = Path(__file__).parents[2]


def stepped(name, dtype=torch.float32):
    """A hidden matrix and a bias after a step, with their optimiser."""
    params = {"layers.0.weight": torch.nn.Parameter(torch.ones(256, 256, dtype=dtype)),
              "layers.0.bias": torch.nn.Parameter(torch.ones(256, dtype=dtype))}
    settings = Optimizer(name=name, momentum=0.9, betas=[0.8, 0.95], eps=1e-6)
    optimizer = build_optimizer(params.items(), settings)
    for param in params.values():
        param.grad = torch.full_like(param, 0.5)
    optimizer.step()
    return settings, optimizer, params


def test_each_optimiser_has_its_factories():
    assert FACTORIES.keys() == OPTIMIZERS.keys()
    assert RULES.keys() == {name for name, spec in OPTIMIZERS.items() if not spec.is_bitsandbytes} | {"lion"}
    assert SHARDABLE == ["adamw", "sgd"]


def test_an_optimiser_is_named_in_its_entry_and_its_factories_alone():
    """No other file compares or looks up its name; the default of recipes and names of other programs are no such."""
    tables = ["lmmods/core/optimizers.py", "lmmods/torch_engine/nn/optim.py", "jax_engine/optim.py",
              "lmmods/recipe/foreign_keys.py"]
    for path in [path for folder in ("lmmods", "jax_engine") for path in (ROOT / folder).rglob("*.py")]:
        if str(path.relative_to(ROOT)) not in tables:
            texts = {node.value for node in ast.walk(ast.parse(path.read_text()))
                     if isinstance(node, ast.Constant) and isinstance(node.value, str)}
            assert not texts & (OPTIMIZERS.keys() - {"adamw"}), path


@pytest.mark.parametrize("name", RULES)
def test_checkpoints_have_the_entries_of_torch(name):
    settings, optimizer, params = stepped(name)
    own = {"params", "lr", "weight_decay", "initial_lr"}
    for group in optimizer.param_groups:
        entries = {key: value for key, value in group.items() if key not in own}
        if settings.spec.has_matrix_rule and group["params"][0].ndim == 2:
            assert entries == settings.muon_options
        else:
            table = {**settings.options, **settings.spec.group}
            # Of bitsandbytes' groups, which have more entries in some of its versions.
            assert entries.items() <= table.items() if name == "lion" else entries == table
    state = optimizer.state[params["layers.0.bias"]]
    entries = {key: value for key, value in state.items() if not (torch.is_tensor(value) and value.ndim)}
    assert entries.keys() == settings.spec.counters(1).keys()
    for key, value in settings.spec.counters(1).items():
        assert key == "RMS" or (entries[key] == value and isinstance(entries[key], int) == isinstance(value, int))


@pytest.mark.parametrize("name", [name for name in OPTIMIZERS if name != "adafactor"])  # less for matrices
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_bytes_of_a_state_are_those_of_torch(name, dtype):
    settings, optimizer, params = stepped(name, dtype)
    matrix = params["layers.0.weight"]
    found = sum(value.nbytes for key, value in optimizer.state[matrix].items()
                if torch.is_tensor(value) and value.ndim and not key.startswith("qmap"))  # code books, which all share
    wanted = settings.spec.bytes_per_parameter(matrix.itemsize) * matrix.numel()
    assert wanted <= found <= 1.02 * wanted
