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
# Virtual environments with the compilers of other devices, by the package that each one provides.
ENVIRONMENTS = {"libtpu": "plan-tpu", "jax_cuda12_plugin": "plan-cuda"}


def plan(parsed: Recipe, on: str) -> None:
    """Estimate memory and step time of a recipe on hardware that need not be present.

    Args:
        on: Target devices: `8xH100`, `v5e-16`, `v5p-64`, `cpu`. They replace `trainer.devices`.

    Raises:
        UserError: There is no such target, the recipe cannot be planned, or the compiler has died.
        SystemExit: With the status of the process that compiles.
    """
    target = target_named(on)
    python = _compiler(target) if parsed.engine == "jax" else None
    if python is None:
        return print_plan(target, *planner_of(parsed, target))
    _, *words = command([parsed.command, *parsed.words])
    # In a separate process: the device's compiler must not run where JAX has started already, and may crash.
    status = subprocess.run([str(python), *words], env=os.environ | {"JAX_PLATFORMS": "cpu"}).returncode
    if status < 0:
        raise UserError(f"--on {target}: the compiler ended with signal {-status}. Remove {python.parents[1]} to plan "
                        "on simulated devices.")
    raise SystemExit(status)


def planner_of(parsed: Recipe, target: Target) -> tuple["Setup", Any]:
    """Build a recipe, whatever devices are present, and the planner of its engine for a target."""
    from lmmods.commands.setup import Setup

    asked: tuple[Any, ...] = ()
    if parsed.engine == "torch":  # whose trainer requires its devices to be present
        setup = Setup(parsed, accelerator="cpu", devices=1, num_nodes=1, strategy="auto", precision="32-true",
                      plugins=None)
        asked = setup.asked["strategy"], setup.asked["precision"]
    else:
        setup = Setup(parsed)
    planner = importlib.import_module(PLANNERS[parsed.engine]).Planner(
        setup.trainer, setup.model, setup.datamodule, target, *asked)
    return setup, planner


def print_plan(target: Target, setup: "Setup", planner: Any) -> None:
    """Plan a recipe and print the plan; if it does not fit, also the first change that makes it fit."""
    recipe = planner.recipe()
    found = planner.plan(recipe)
    say(f"Plan for {target}, {setup.recipe.engine}, {planner.precision}, {recipe.rows} x {recipe.accumulated} rows "
        f"on each of {found.ranks}:")
    for line in found.lines(planner.length.num_steps(recipe.rows * found.ranks, recipe.accumulated)):
        say(line)
    if planner.missing:
        say(f"This is simulated. `make {ENVIRONMENTS[planner.missing]}` installs the device's own compiler.")
    if found.fits:
        return
    tried = first_that_fits(planner, recipe, found, setup.model.pretrained is not None and not setup.model.freezes)
    if tried is None:
        say("Fewer rows, gradient checkpointing, sharding and quantisation do not make it fit. Use more devices, "
            "shorter rows or a smaller model.")
        return
    variant, found = tried
    say(f"It fits with {', '.join(variant.changed)}:")
    for line in found.lines(planner.length.num_steps(variant.rows * found.ranks, variant.accumulated)):
        say(line)


def _compiler(on: Target) -> Path | None:
    """Return the Python of the environment that compiles for a target; None if this one does, or there is none."""
    from jax_engine.planning import has, plugin

    package = plugin(on)
    if package is None or has(package):
        return None
    python = Path(lmmods.__path__[0]).parent / f".{ENVIRONMENTS[package]}" / "bin" / "python"
    return python if python.exists() else None


def first_that_fits(planner: Any, recipe: Variant, found: StepPlan, may_quantize: bool
                    ) -> tuple[Variant, StepPlan] | None:
    """Return the first variant of a recipe that fits, with the largest micro-batch that fits; None if none does.

    Args:
        found: Plan of the recipe itself, which does not fit.
    """
    hopeless = []  # (strategy, base) whose parameters and optimiser state alone do not fit
    for way in [recipe, *remedies(recipe, planner.on.num_devices, may_quantize, planner.may_shard)]:
        kept, sizes = (way.strategy, way.quantize), list(way.smaller())
        if kept in hopeless:
            continue
        if way is not recipe and (found := planner.plan(way)).fits:
            return way, found
        if found.kept > found.room:
            hopeless.append(kept)
            continue
        if not sizes or not (least := planner.plan(sizes[-1])).fits:
            continue
        best = sizes[-1], least
        for variant in sizes[-2::-1]:  # increase the rows until they no longer fit
            if not (found := planner.plan(variant)).fits:
                break
            best = variant, found
        return best
    return None
