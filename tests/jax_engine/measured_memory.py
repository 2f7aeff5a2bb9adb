"""Planned and measured memory of a recipe's step on this CPU."""

import json

import jax
import numpy as np

from jax_engine.distributed.devices import spread
from jax_engine.distributed.steps import Clipping, Steps
from jax_engine.optim import build, step_scalars
from lmmods.commands.plan import planner_of
from lmmods.commands.registry import options_of
from lmmods.core.hardware import target_named
from lmmods.recipe.reader import parse
from tests.peak_memory import give_back, taken


def measure(recipe: str) -> tuple[int, int]:
    """Return the planned and the measured bytes of a recipe, whose arguments are JSON."""
    from jax_engine.planning import outline_batch

    parsed = parse(["plan", *json.loads(recipe), "--engine", "jax", "--on", "cpu"], options_of("plan")[0])
    setup, planner = planner_of(parsed, target_named("cpu"))
    model, datamodule = setup.model, setup.datamodule
    variant = planner.recipe()
    assert variant.accumulated == 1
    planned = planner.plan(variant).total
    parallel = spread("auto", jax.devices()[:1])
    trainable, frozen = model.build(planner.precision, datamodule, 0)
    optimizer = build(model.optimizer, model.network.decays(trainable))
    steps = Steps(parallel, model.batch_loss, optimizer, Clipping(setup.trainer.gradient_clip_val), None)
    outline = outline_batch(planner.example, 1, variant.rows, datamodule.max_length)
    batch = parallel.put_batch({name: np.ones(x.shape, x.dtype) for name, x in outline.items()})
    state, frozen = steps.new_state(parallel.put_state(trainable)), parallel.put_state(frozen)
    scalars = parallel.put_scalars(step_scalars(model.optimizer, 0, 10))
    del trainable

    def step():
        nonlocal state
        state, figures = steps.full_step(state, frozen, batch, scalars)
        jax.block_until_ready((state, figures))

    step()
    return planned, sum(leaf.nbytes for leaf in jax.tree.leaves((state, frozen, batch))) + taken(step)


def compare(*recipes: str) -> None:
    """Print the planned and the measured bytes of each recipe, whose arguments are JSON."""
    give_back()
    for recipe in recipes:
        print("bytes", *measure(recipe))
