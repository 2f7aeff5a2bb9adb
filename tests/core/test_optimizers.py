"""The table of optimisers: the factories of both engines, and the entries and sizes of torch's states."""

import ast
from pathlib import Path

import pytest
import torch

from jax_engine.optim import RULES
from lmmods.core.optimizers import OPTIMIZERS, SHARDABLE
from lmmods.core.settings import Optimizer
from lmmods.torch_engine.nn.optim import FACTORIES, build_optimizer

ROOT = Path(__file__).parents[2]


def take_step(name, dtype=torch.float32):
    """Return settings, optimiser and parameters (a hidden matrix and a bias) after one step."""
    params = {"layers.0.weight": torch.nn.Parameter(torch.ones(256, 256, dtype=dtype)),
              "layers.0.bias": torch.nn.Parameter(torch.ones(256, dtype=dtype))}
    settings = Optimizer(name=name, momentum=0.9, betas=[0.8, 0.95], eps=1e-6)
    optimizer = build_optimizer(params.items(), settings)
    for param in params.values():
        param.grad = torch.full_like(param, 0.5)
    optimizer.step()
    return settings, optimizer, params


def test_each_optimiser_has_a_factory_in_both_engines():
    assert FACTORIES.keys() == OPTIMIZERS.keys()
    assert RULES.keys() == {name for name, spec in OPTIMIZERS.items() if not spec.is_bitsandbytes} | {"lion"}
    assert SHARDABLE == ["adamw", "sgd"]


def test_only_the_tables_mention_optimisers_by_name():
    """Except the default of recipes and names in other programs."""
    tables = ["lmmods/core/optimizers.py", "lmmods/torch_engine/nn/optim.py", "jax_engine/optim.py",
              "lmmods/recipe/foreign_keys.py"]
    for path in [path for folder in ("lmmods", "jax_engine") for path in (ROOT / folder).rglob("*.py")]:
        if str(path.relative_to(ROOT)) not in tables:
            strings = {node.value for node in ast.walk(ast.parse(path.read_text()))
                       if isinstance(node, ast.Constant) and isinstance(node.value, str)}
            assert not strings & (OPTIMIZERS.keys() - {"adamw"}), path


@pytest.mark.parametrize("name", RULES)
def test_checkpoint_entries_equal_those_of_torch(name):
    settings, optimizer, params = take_step(name)
    skipped = {"params", "lr", "weight_decay", "initial_lr"}
    for group in optimizer.param_groups:
        entries = {key: value for key, value in group.items() if key not in skipped}
        if settings.spec.has_matrix_rule and group["params"][0].ndim == 2:
            assert entries == settings.muon_options
        else:
            table = {**settings.options, **settings.spec.group}
            # In some versions, bitsandbytes' groups have more entries.
            assert entries.items() <= table.items() if name == "lion" else entries == table
    state = optimizer.state[params["layers.0.bias"]]
    entries = {key: value for key, value in state.items() if not (torch.is_tensor(value) and value.ndim)}
    assert entries.keys() == settings.spec.counters(1).keys()
    for key, value in settings.spec.counters(1).items():
        assert key == "RMS" or (entries[key] == value and isinstance(entries[key], int) == isinstance(value, int))


@pytest.mark.parametrize("name", [name for name in OPTIMIZERS if name != "adafactor"])  # smaller for matrices
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_state_sizes_equal_those_of_torch(name, dtype):
    settings, optimizer, params = take_step(name, dtype)
    matrix = params["layers.0.weight"]
    num_bytes = sum(value.nbytes for key, value in optimizer.state[matrix].items()
                    if torch.is_tensor(value) and value.ndim and not key.startswith("qmap"))  # shared code books
    expected = settings.spec.bytes_per_parameter(matrix.itemsize) * matrix.numel()
    assert expected <= num_bytes <= 1.02 * expected
