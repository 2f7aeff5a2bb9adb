"""`plan`: estimate memory and run time of a recipe on devices that need not be present."""

import importlib
import os
import subprocess
from pathlib import Path
from typing import Any

import lmmods
from lmmods.commands.command_line import CommandLine, RecipeTypes
from lmmods.commands.engine_cli import EngineCLI
from lmmods.commands.programs import command
from lmmods.core.console import say
from lmmods.core.errors import UserError
from lmmods.core.hardware import Target, target_named
from lmmods.core.plan import StepPlan, Variant, remedies

PLANNERS = {"jax": "jax_engine.planning", "torch": "lmmods.torch_engine.planning"}
# Virtual environments with the compilers of other devices, by the package that each one provides.
ENVIRONMENTS = {"libtpu": "plan-tpu", "jax_cuda12_plugin": "plan-cuda"}


def plan(types: RecipeTypes, engine: str, arguments: list[str]) -> None:
    """Perform `plan`, whose options are those of `EngineCommands.plan`.

    Raises:
        UserError: The options or the recipe are wrong, or the compiler has died.
        SystemExit: With the status of the process that compiles.
    """
    on = target_named(CommandLine(types, engine, arguments).parse(arguments).plan.on)
    python = _compiler(on) if engine == "jax" else None
    if python is None:
        Planning(types, engine, arguments)
        return
    _, *words = command(arguments)
    # In a separate process: the device's compiler must not run where JAX has started already, and may crash.
    status = subprocess.run([str(python), *words], env=os.environ | {"JAX_PLATFORMS": "cpu"}).returncode
    if status < 0:
        raise UserError(f"--on {on}: the compiler ended with signal {-status}. Without {python.parents[1]} the plan is "
                        "made on simulated devices.")
    raise SystemExit(status)


def _compiler(on: Target) -> Path | None:
    """Return the Python of the environment that compiles for a target; None if this one does, or there is none."""
    from jax_engine.planning import has, plugin

    package = plugin(on)
    if package is None or has(package):
        return None
    python = Path(lmmods.__path__[0]).parent / f".{ENVIRONMENTS[package]}" / "bin" / "python"
    return python if python.exists() else None


class Planning(EngineCLI):
    """Engine command line that plans a recipe, whatever devices are present."""

    def instantiate_trainer(self, **kwargs: Any) -> Any:
        """Record devices and strategy for the planner; Lightning's method would require the devices to be present."""
        if self.engine != "torch":
            self._asked: tuple[Any, ...] = ()
            return super().instantiate_trainer(**kwargs)
        keys = self.config_init[self.subcommand]["trainer"]
        self._asked = keys["strategy"], keys["precision"]
        here = {"accelerator": "cpu", "devices": 1, "num_nodes": 1, "strategy": "auto", "precision": "32-true"}
        return super().instantiate_trainer(**kwargs, **here, plugins=None)

    def plan(self, model: Any, datamodule: Any, on: str) -> None:
        """Perform `plan`; arguments as of `EngineCommands.plan`.

        Raises:
            UserError: There is no such target, or the recipe cannot be planned.
        """
        target = target_named(on)
        planner = importlib.import_module(PLANNERS[self.engine]).Planner(
            self.trainer, model, datamodule, target, *self._asked)
        recipe = planner.recipe()
        found = planner.plan(recipe)
        say(f"Plan for {target}, {self.engine}, {planner.precision}, {recipe.rows} x {recipe.accumulated} rows on each "
            f"of {found.ranks}:")
        for line in found.lines(planner.length.num_steps(recipe.rows * found.ranks, recipe.accumulated)):
            say(line)
        if planner.missing:
            say(f"What is simulated here, `make {ENVIRONMENTS[planner.missing]}` compiles for the device itself.")
        if not found.fits:
            self._say_remedy(planner, recipe, found)

    def _say_remedy(self, planner: Any, recipe: Variant, found: StepPlan) -> None:
        """Print the first change that makes the recipe fit."""
        tried = first_that_fits(planner, recipe, found, self.model.pretrained is not None)
        if tried is None:
            say("No change of rows, gradient checkpointing, sharding or quantisation makes it fit: take more devices, "
                "shorter rows or a smaller model.")
            return
        variant, found = tried
        say(f"It fits with {', '.join(variant.changed)}:")
        for line in found.lines(planner.length.num_steps(variant.rows * found.ranks, variant.accumulated)):
            say(line)


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
