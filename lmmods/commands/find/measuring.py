"""`find` at work within an engine: a recipe is rehearsed, and the learning rate or the needs of a step are measured."""

import sys
from pathlib import Path
from typing import Any, Literal

import psutil

from lmmods.commands.engine_cli import EngineCLI
from lmmods.commands.find.plot import draw
from lmmods.commands.find.recipe_file import RecipeFiles
from lmmods.core.console import say
from lmmods.core.progress_bar import Bar
from lmmods.core.range_test import RangeTest
from lmmods.core.step_probe import StepProbe
from lmmods.runs.atomic import write_json
from lmmods.runs.step_metrics import NotFinite

# Of `trainer`, what a rehearsal sets in place of the recipe's value.
UNSEEN = {"max_epochs": -1, "min_epochs": None, "min_steps": None, "max_time": None, "fast_dev_run": False,
          "profiler": None, "barebones": False, "callbacks": None, "enable_checkpointing": False,
          "enable_progress_bar": False, "limit_val_batches": 0, "num_sanity_val_steps": 0, "val_check_interval": None,
          "check_val_every_n_epoch": 10**9}


class Finder(EngineCLI):
    """One engine's classes, rehearsing a recipe: nothing is logged, sampled or saved, and no folder is made."""

    def before_instantiate_classes(self) -> None:
        super().before_instantiate_classes()
        recipe, defaults = self.recipe, self.parser.commands["find"].get_defaults()
        for block in ("checkpoint", "samples", "mmlu", "publish"):
            recipe[block] = defaults[block]
        changes = UNSEEN | {"max_steps": recipe.steps}
        if recipe.what == "step":
            changes |= {"max_steps": StepProbe.num_steps, "limit_val_batches": 1, "num_sanity_val_steps": 1}
        for key, value in changes.items():
            if key in recipe.trainer:
                recipe.trainer[key] = value

    def find(self, model: Any, datamodule: Any, what: Literal["lr", "batch_size", "both", "step"] = "both",
             steps: int = 100, min_lr: float = 1e-7, max_lr: float = 1.0, memory: float | None = None,
             plot: str = "lr.png", write: bool = False, result: str | None = None) -> None:
        """Perform `find` of a learning rate or a step; arguments as of `EngineCommands.find`."""
        if what == "step":
            return self._step(model, datamodule, result)
        test = RangeTest(min_lr, max_lr, steps)
        files = RecipeFiles(self.arguments)
        if write:
            files.check(["model.init_args.optimizer.lr"])
        self._range_test(model, datamodule, test)
        if not self.trainer.is_global_zero:
            return
        try:
            suggestion = test.suggestion()
        finally:
            draw(test, Path(plot))
        say(f"Learning rate {suggestion:g}: there the loss falls fastest over {len(test.rates)} steps from "
            f"{test.rates[0]:.2g} to {test.rates[-1]:.2g}. It is the peak, for `model.optimizer.lr`. Curve: {plot}")
        found = {"model.init_args.optimizer.lr": suggestion}
        if result:
            write_json(Path(result), {"lr": suggestion, "rates": test.rates, "losses": test.losses,
                                      "smoothed": test.smoothed, "diverged": test.diverged})
        files.put(found, write)

    def _range_test(self, model: Any, datamodule: Any, test: RangeTest) -> None:
        model.optimizer = test.ramp(model.optimizer)
        bar = Bar(self.trainer.is_global_zero)
        bar.open("range test", test.num_steps)

        def watch(figures: dict[str, float]) -> bool:
            over, done = test.add(figures), len(test.rates)
            shown = done % 10 == 0 and not over
            bar.update(done, f"lr {test.rates[-1]:.2g}  loss {test.smoothed[-1]:.4g}" if shown else "")
            return over

        try:
            self.trainer.rehearse(model, datamodule, watch)
        except NotFinite:
            test.diverged = True
        finally:
            bar.close()

    def _step(self, model: Any, datamodule: Any, result: str | None) -> None:
        probe = StepProbe()
        datamodule.longest_first = True
        if datamodule.streaming:  # whose longest rows nobody knows
            datamodule.pad_to_multiple_of = datamodule.max_length
        on_device = self.trainer.rehearse(model, datamodule, probe.add)
        if not self.trainer.is_global_zero:
            return
        found = {**probe.found(), "memory": (on_device or peak_of_process()) / 2**30,
                 "on_device": on_device is not None}
        if result:
            write_json(Path(result), found)
        where = "on the first device" if found["on_device"] else "of this machine"
        say(f"A step of {datamodule.batch_size} × {self.trainer.accumulate_grad_batches} of the longest rows takes "
            f"{found['seconds_per_step']:.3g} s ({found['tokens_per_second']:,.0f} tokens per second) and at its peak "
            f"{found['memory']:.2f} GiB {where}.")


def peak_of_process() -> int:
    """Most bytes of memory that this process has held so far."""
    if sys.platform == "win32":
        return psutil.Process().memory_info().peak_wset
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
