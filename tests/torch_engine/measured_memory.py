"""Compare the planned memory of a recipe's step on this CPU with the memory it uses."""

import json
from collections.abc import Iterator

import torch

from lmmods.commands.plan import planner_of
from lmmods.commands.registry import options_of
from lmmods.core.hardware import target_named
from lmmods.recipe.reader import parse
from lmmods.torch_engine.nn.optim import build_optimizer
from lmmods.torch_engine.planning import full_batch, stand_in, take_step
from tests.peak_memory import give_back, taken


def measure_bytes(recipe: str) -> tuple[int, int]:
    """Return the planned and the measured bytes of a recipe, whose arguments are JSON."""
    parsed = parse(["plan", *json.loads(recipe), "--on", "cpu"], options_of("plan")[0])
    setup, planner = planner_of(parsed, target_named("cpu"))
    model, datamodule = setup.model, setup.datamodule
    variant = planner.recipe()
    planned = planner.plan(variant).total
    model.trainer = stand_in(datamodule, planner.precision, variant.accumulated, setup.trainer.clip_val)
    model.configure_model()
    optimizer = build_optimizer(model.named_parameters(), model.optimizer)
    batches = [full_batch(planner.example, variant.rows, datamodule.max_length)] * variant.accumulated

    def step():
        take_step(model, optimizer, batches)

    step()
    sizes = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
             for tensor in (*iterate_tensors(model, optimizer), *batches[0].values())}
    return planned, sum(sizes.values()) + taken(step)


def iterate_tensors(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    """Yield the tensors that exist between steps."""
    for param in model.parameters():
        yield param
        if param.grad is not None:
            yield param.grad
        if (packed := getattr(param, "quant_state", None)) is not None:
            yield from (packed.absmax, packed.state2.absmax)
    for values in optimizer.state.values():
        yield from (value for value in values.values() if torch.is_tensor(value))


def compare(*recipes: str) -> None:
    """Print the planned and the measured bytes of each recipe. A recipe is its arguments as JSON."""
    give_back()
    for recipe in recipes:
        print("bytes", *measure_bytes(recipe))
