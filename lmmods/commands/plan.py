"""`plan`: estimate memory and run time of a recipe on devices that need not be present."""

import importlib
import os
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lmmods
from lmmods.commands.programs import command
from lmmods.core.console import say
from lmmods.core.errors import UserError
from lmmods.core.hardware import Target, target_named
from lmmods.core.plan import StepPlan, Variant, remedies
from lmmods.recipe.reader import Recipe

if TYPE_CHECKING:
    from lmmods.commands.setup import Setup

PLANNERS = {"jax": "jax_engine.planning", "torch": "lmmods.torch_engine.planning"}
# Virtual environments with the compilers of other devices, by the package that each provides.
ENVIRONMENTS = {"libtpu": "plan-tpu", "jax_cuda12_plugin": "plan-cuda"}


def plan(parsed: Recipe, on: str) -> None:
    """Estimate memory and step time of a recipe on hardware that need not be present.

    Args:
        on: Target devices: `8xH100`, `v5e-16`, `v5p-64`, `cpu`. They replace `trainer.devices`.

    Raises:
        UserError: The target does not exist, the recipe cannot be planned, or the compiler has crashed.
        SystemExit: A separate process has compiled; with its exit status.
    """
    target = target_named(on)
    python = _find_compiler(target) if parsed.engine == "jax" else None
    if python is None:
        return print_plan(target, *planner_of(parsed, target))
    _, *words = command([parsed.command, *parsed.words])
    # In a separate process, because JAX has already started in this one, and because the compiler may crash.
    status = subprocess.run([str(python), *words], env=os.environ | {"JAX_PLATFORMS": "cpu"}).returncode
    if status < 0:
        raise UserError(f"--on {target}: the compiler ended with signal {-status}. Remove {python.parents[1]} to plan "
                        "on simulated devices.")
    raise SystemExit(status)


def planner_of(parsed: Recipe, target: Target) -> tuple["Setup", Any]:
    """Build a recipe without its devices, and its engine's planner for a target."""
    from lmmods.commands.setup import Setup

    requested: tuple[Any, ...] = ()
    if parsed.engine == "torch":  # its trainer fails if a device is missing
        setup = Setup(parsed, accelerator="cpu", devices=1, num_nodes=1, strategy="auto", precision="32-true",
                      plugins=None)
        requested = setup.trainer_arguments["strategy"], setup.trainer_arguments["precision"]
    else:
        setup = Setup(parsed)
    planner = importlib.import_module(PLANNERS[parsed.engine]).Planner(
        setup.trainer, setup.model, setup.datamodule, target, *requested)
    return setup, planner


def print_plan(target: Target, setup: "Setup", planner: Any) -> None:
    """Print the plan of a recipe and, if it does not fit, the first change that makes it fit."""
    recipe = planner.recipe()
    step_plan = planner.plan(recipe)
    say(f"Plan for {target}, {setup.recipe.engine}, {planner.precision}, {recipe.rows} x {recipe.accumulated} rows "
        f"on each of {step_plan.ranks}:")
    for line in step_plan.lines(planner.length.num_steps(recipe.rows * step_plan.ranks, recipe.accumulated)):
        say(line)
    if planner.missing:
        say(f"This is simulated. `make {ENVIRONMENTS[planner.missing]}` installs the device's own compiler.")
    if step_plan.fits:
        return
    may_quantize = setup.model.pretrained is not None and not setup.model.freezes
    result = find_fitting_variant(planner, recipe, step_plan, may_quantize)
    if result is None:
        say("Fewer rows, gradient checkpointing, sharding and quantisation do not make it fit. Use more devices, "
            "shorter rows or a smaller model.")
        return
    variant, step_plan = result
    say(f"It fits with {', '.join(variant.changed)}:")
    for line in step_plan.lines(planner.length.num_steps(variant.rows * step_plan.ranks, variant.accumulated)):
        say(line)


def _find_compiler(on: Target) -> Path | None:
    """Return the Python of the environment that compiles for a target; None if it is this one, or not installed."""
    from jax_engine.planning import has, plugin

    package = plugin(on)
    if package is None or has(package):
        return None
    python = Path(lmmods.__path__[0]).parent / f".{ENVIRONMENTS[package]}" / "bin" / "python"
    return python if python.exists() else None


def find_fitting_variant(planner: Any, recipe: Variant, step_plan: StepPlan, may_quantize: bool
                         ) -> tuple[Variant, StepPlan] | None:
    """Return the first variant of a recipe that fits, with the largest micro-batch that fits; None if none does.

    Args:
        step_plan: Plan of the recipe itself, which does not fit.
    """
    hopeless = []  # (strategy, base) whose parameters and optimiser state alone do not fit
    for variant in [recipe, *remedies(recipe, planner.on.num_devices, may_quantize, planner.may_shard)]:
        placement, sizes = (variant.strategy, variant.quantize), list(variant.smaller())
        if placement in hopeless:
            continue
        if variant is not recipe and (step_plan := planner.plan(variant)).fits:
            return variant, step_plan
        if step_plan.kept > step_plan.available:
            hopeless.append(placement)
            continue
        if not sizes or not (smallest_plan := planner.plan(sizes[-1])).fits:
            continue
        best = sizes[-1], smallest_plan
        for smaller in sizes[-2::-1]:  # increase the rows until they no longer fit
            if not (step_plan := planner.plan(smaller)).fits:
                break
            best = smaller, step_plan
        return best
    return None
