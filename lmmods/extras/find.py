"""`find`: find the learning rate and the batch size for a recipe."""

import json
import math
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import psutil
import yaml

from lmmods.commands.programs import command, last_error, started
from lmmods.core.console import say
from lmmods.core.errors import UserError
from lmmods.core.files import check_place
from lmmods.core.memory import GIB, StepMemory
from lmmods.core.progress_bar import Bar
from lmmods.core.settings import Optimizer, require
from lmmods.extras.dry_run import dry_run
from lmmods.recipe.files import CONFIG_OPTIONS, RecipeLoader, option_values, read_recipe, read_text
from lmmods.recipe.keys import BLOCKS, keys_of
from lmmods.recipe.reader import Recipe
from lmmods.runs.atomic import write_json, write_text
from lmmods.runs.run_files import LIST
from lmmods.runs.step_metrics import NotFinite

if TYPE_CHECKING:
    from lmmods.commands.setup import Setup

# ---------------------------------------------------------------------------------------------------------------------
# Learning rate range test: a short training whose rate rises until the loss diverges (Smith 2015).
#
# Source: L. N. Smith, Cyclical Learning Rates for Training Neural Networks, arXiv:1506.01186, section 3.3. Smoothing,
# the divergence criterion and the suggestion at the steepest descent follow fast.ai's `lr_find` and Lightning's
# LearningRateFinder, except for how the slope is measured: batches of text vary so much that the difference of two
# smoothed losses is mostly noise, so a line is fitted to a window of steps, and its slope must be clearly negative.

SMOOTHING = 0.98  # decay of the running mean of the loss
DIVERGED = 4.0  # factor over the lowest smoothed loss
WINDOW = 8  # a line is fitted to a quarter of the steps: 1/WINDOW of them on each side
CLEAR = 3.0  # standard errors by which the slope must be below zero
FEWEST = 20  # minimum number of steps


class Ramp:
    """Recipe optimiser whose rate rises by a constant factor per step, from `low` at the first to `high` at the last.
    Duck-types `Optimizer` instead of subclassing it, so that no recipe can name it."""

    def __init__(self, optimizer: Optimizer, low: float, high: float) -> None:
        vars(self).update(vars(optimizer))
        self.low, self.lr = low, high

    def __getattr__(self, name: str) -> Any:
        """Return a method of `Optimizer`, bound to this."""
        return getattr(Optimizer, name).__get__(self)

    def lr_at(self, step: int, num_steps: int) -> float:
        """Return the rate at a step, as `Optimizer.lr_at` does."""
        return self.low * (self.lr / self.low) ** (min(step, num_steps - 1) / (num_steps - 1))


@dataclass
class RangeTest:
    """Losses of a ramp and the learning rate they suggest.

    Args:
        min_lr: Rate of the first step.
        max_lr: Rate of the last step, unless the loss diverges before.
        num_steps: Optimiser steps of the ramp.

    Raises:
        UserError: The arguments do not define a ramp.
    """

    min_lr: float = 1e-7
    max_lr: float = 1.0
    num_steps: int = 100
    rates: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    smoothed: list[float] = field(default_factory=list)
    diverged: bool = False

    def __post_init__(self) -> None:
        require(self.num_steps >= FEWEST, "--steps", self.num_steps, f"{FEWEST} or more")
        require(0 < self.min_lr < self.max_lr < math.inf, "--min_lr", self.min_lr, "above 0 and below --max_lr")
        self._mean = 0.0

    def ramp(self, optimizer: Optimizer) -> Ramp:
        """Return a recipe's optimiser with the ramp in place of its schedule."""
        return Ramp(optimizer, self.min_lr, self.max_lr)

    def add(self, figures: dict[str, float]) -> bool:
        """Record the `lr` and `loss` of an optimiser step and return whether the test is over."""
        if self.diverged:
            return True
        loss = figures["loss"]
        if not math.isfinite(loss):
            self.diverged = True
            return True
        self.rates.append(figures["lr"])
        self.losses.append(loss)
        self._mean = SMOOTHING * self._mean + (1 - SMOOTHING) * loss
        self.smoothed.append(self._mean / (1 - SMOOTHING ** len(self.losses)))
        self.diverged = len(self.losses) > 1 and self.smoothed[-1] > DIVERGED * min(self.smoothed)
        return self.diverged or len(self.losses) == self.num_steps

    def suggestion(self) -> float:
        """Return the rate of the steepest loss descent over log(rate), rounded to two digits.

        Raises:
            UserError: The loss never falls clearly, or it diverged after too few steps.
        """
        half = self.num_steps // WINDOW
        last = min(int(np.argmin(self.smoothed)) if self.smoothed else 0, len(self.losses) - 1 - half)
        if last < half:
            raise UserError(f"The loss diverged or stopped falling within {len(self.losses)} of {self.num_steps} "
                            "steps, too early to find a learning rate: lower --min_lr or raise --steps.")
        offsets = np.arange(-half, half + 1)  # the logarithms of the rates are evenly spaced
        spread = float((offsets**2).sum())
        fits = {}
        for centre in range(half, last + 1):
            losses = np.array(self.losses[centre - half : centre + half + 1])
            slope = float(offsets @ losses) / spread
            rest = losses - losses.mean() - slope * offsets
            fits[centre] = slope, math.sqrt(float(rest @ rest) / (len(rest) - 2) / spread)
        best = min(fits, key=lambda centre: fits[centre][0])
        slope, error = fits[best]
        if slope >= -CLEAR * error:
            raise UserError(f"The loss falls nowhere clearly between learning rates of {self.min_lr:g} and "
                            f"{self.rates[-1]:.2g}: batches differ by more. Raise --steps; a model that is trained "
                            "already may have nothing left to learn from these rows.")
        return float(f"{self.rates[best]:.1e}")


# ---------------------------------------------------------------------------------------------------------------------
# Fastest batch size that fits, by steps measured in separate processes.
#
# Only sizes that divide the rows of an optimiser step are tried, with gradient accumulation making up the rest, so
# that the optimiser steps of the run stay the same.

GAIN = 1.03  # minimum speed-up that justifies a larger batch's memory
# Keys counted in training micro-batches; they scale with the micro-batch size.
COUNTED = ("limit_train_batches", "overfit_batches")
EVALUATED = ("limit_val_batches", "limit_test_batches", "limit_predict_batches")


@dataclass(frozen=True)
class Measured:
    """Measurement of a step with a batch size.

    Args:
        tokens_per_second: Real (non-padding) tokens, with the longest rows; 0 if it did not fit.
        memory: Memory of the step; None if it is unknown.
        problem: Why it does not fit; empty if it does.
    """

    batch_size: int
    tokens_per_second: float = 0.0
    memory: StepMemory | None = None
    problem: str = ""


class Sizes:
    """Batch sizes that leave a recipe's optimiser steps unchanged, and the keys that each one sets.

    Args:
        recipe: Plain values of the recipe.
    """

    def __init__(self, recipe: dict[str, Any]) -> None:
        trainer, data = recipe["trainer"], recipe["data"]["init_args"]
        self.now: int = data["batch_size"]
        self._rows: int = data["batch_size"] * trainer["accumulate_grad_batches"]
        self._counts = {f"trainer.{key}": trainer[key] for key in COUNTED
                        if isinstance(trainer.get(key), int) and trainer[key]}
        limited = any(isinstance(trainer.get(key), int) and trainer[key] for key in EVALUATED)
        self._eval_size = self.now if limited and data.get("eval_batch_size") is None else None

    def all(self) -> list[int]:
        """Return the sizes in ascending order, including the recipe's own."""
        return [size for size in range(1, self._rows + 1) if self._rows % size == 0
                and all(count * self.now % size == 0 for count in self._counts.values())]

    def accumulated(self, size: int) -> int:
        """Return the number of micro-batches per step."""
        return self._rows // size

    def changes(self, size: int) -> dict[str, int]:
        """Return the recipe keys that a size sets, with their values."""
        if size == self.now:
            return {}
        counts = {key: count * self.now // size for key, count in self._counts.items()}
        kept = {"data.init_args.eval_batch_size": self._eval_size} if self._eval_size else {}
        return {"data.init_args.batch_size": size,
                "trainer.accumulate_grad_batches": self.accumulated(size), **counts, **kept}


def search(sizes: list[int], now: int, measure: Callable[[int], Measured]) -> list[Measured]:
    """Measure sizes from `now`: double while it fits and gets faster, halve until it fits, then bisect in between.

    Args:
        sizes: Ascending sizes. A size that would not fit, extrapolating the last two that did, is not measured.

    Returns:
        The measurements in the order they were made.
    """
    tried: dict[int, Measured] = {}

    def fits(size: int) -> bool:
        if size not in tried:
            tried[size] = _too_large(size, tried) or measure(size)
        return not tried[size].problem

    def faster(size: int, than: int) -> bool:
        return tried[size].tokens_per_second >= GAIN * tried[than].tokens_per_second

    low, high = now, None  # largest that fits, smallest that does not
    while not fits(low):
        high = low
        smaller = [size for size in sizes if size <= low // 2] or [size for size in sizes if size < low]
        if not smaller:
            return list(tried.values())
        low = smaller[-1]
    grows = high is None
    while grows and (larger := [size for size in sizes if size >= 2 * low] or [size for size in sizes if size > low]):
        if not fits(larger[0]):
            high = larger[0]
            break
        low, grows = (larger[0], True) if faster(larger[0], low) else (low, False)
    while high is not None and (between := [size for size in sizes if low < size < high]):
        middle = between[len(between) // 2]
        if fits(middle):
            low = middle
        else:
            high = middle
    return list(tried.values())


def best(tried: list[Measured]) -> Measured:
    """Return the fastest that fits, the smallest among those about as fast. Raises UserError: none fits."""
    fitting = sorted((each for each in tried if not each.problem), key=lambda each: each.batch_size)
    if not fitting:
        smallest = min(tried, key=lambda each: each.batch_size)
        raise UserError(f"Not even a batch of {smallest.batch_size} fits ({smallest.problem}). Lower data.max_length, "
                        "set model.gradient_checkpointing, or train an adapter on a quantised base.")
    fastest = max(each.tokens_per_second for each in fitting)
    return next(each for each in fitting if GAIN * each.tokens_per_second >= fastest)


def _too_large(size: int, tried: dict[int, Measured]) -> Measured | None:
    """Extrapolate a size's memory from the two largest that fitted; None if it is expected to fit."""
    fitting = sorted((each for each in tried.values() if not each.problem), key=lambda each: each.batch_size)[-2:]
    if len(fitting) < 2:
        return None
    first, last = fitting
    slope = (last.memory.needed - first.memory.needed) / (last.batch_size - first.batch_size)
    memory = measured_memory(last.memory.needed + slope * (size - last.batch_size), last.memory.available)
    if size < last.batch_size or memory.fits:
        return None
    return Measured(size, 0.0, memory, f"would need about {memory.needed / GIB:.1f} of {memory.available / GIB:.1f} "
                                       "GiB")


def measured_memory(peak: float, available: float) -> StepMemory:
    """Return the memory of a step whose peak was measured; both in bytes."""
    return StepMemory({"peak": peak}, available, "measured")


SHARE = 0.85  # share of this machine's free memory that a search may use
CGROUP = Path("/sys/fs/cgroup/memory.max")


def find(parsed: Recipe, what: Literal["lr", "batch_size", "both", "step"] = "both", steps: int = 100,
         min_lr: float = 1e-7, max_lr: float = 1.0, memory: float | None = None, plot: str = "lr.png",
         write: bool = False, result: str | None = None) -> None:
    """Find the learning rate and the fastest batch size; neither takes or makes a run folder.

    Args:
        what: `lr`: a range test. `batch_size`: the fastest that fits, with the same rows in each optimiser step.
            `both`: one after the other. `step`: only measure a step of the recipe as it is, on its longest rows.
        steps: Optimiser steps of the range test.
        min_lr: Learning rate of its first step.
        max_lr: Learning rate of its last step, if the loss does not diverge before.
        memory: GiB that a batch may need, on each GPU or else of this machine; null is what is free.
        plot: Picture of the range test.
        write: Write what is found into the recipe's file; comments stay.
        result: File to write what is found to, as JSON.

    Raises:
        UserError: The options or the recipe are wrong, nothing fits, or nothing can be suggested.
    """
    require(memory is None or memory > 0, "--memory", memory, "GiB, more than 0")
    if result:
        check_place("--result", Path(result))
    if what in ("lr", "both"):
        task = parsed.kind("model")
        if not getattr(task, "loss_falls", True):
            name = task.__name__.removesuffix("Fields")
            raise UserError(f"find --what {what}: the loss of {name} does not fall as the model gets better, so it "
                            "says nothing of the rate. Take --what batch_size, and compare rates by "
                            f"{task.ranked_by[0]}: python train.py sweep.")
        test = RangeTest(min_lr, max_lr, steps)
        check_replaceable(Path(plot))
    if what == "lr":
        return find_rate(parsed, test, plot, write, result)
    if what == "step":
        return measure_step(parsed, result)
    arguments = [parsed.command, *parsed.words]
    changes = _find_batch_size(parsed, arguments, memory, write)
    found: dict[str, Any] = {key.rsplit(".", 1)[-1]: value for key, value in changes.items()}
    if what == "both":
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "lr.json"
            words = [*arguments, *([] if write else _words(changes)), "--what", "lr", "--result", str(path)]
            # In a separate process, as the engine may launch further processes by repeating its command line.
            if status := subprocess.run(command(words)).returncode:
                raise SystemExit(status)
            found |= json.loads(path.read_text())
    if result:
        write_json(Path(result), found)


def _find_batch_size(parsed: Recipe, arguments: list[str], memory: float | None, write: bool) -> dict[str, int]:
    """Return the keys that the best batch size changes, written if requested; empty if the recipe has it already."""
    from lmmods.recipe.library_classes import LibraryClasses, whole

    recipe = whole(parsed, LibraryClasses(parsed))
    if recipe["trainer"]["num_nodes"] > 1 or "LOCAL_RANK" in os.environ:
        raise UserError("find starts processes of its own to measure batch sizes: run it on one machine, without a "
                        "launcher.")
    sizes, files = Sizes(recipe), RecipeFiles(arguments)
    if write:
        files.check(list(sizes.changes(next((size for size in sizes.all() if size != sizes.now), sizes.now))))
    limit = free_memory() * SHARE
    tried = search(sizes.all(), sizes.now, lambda size: _measure(sizes, size, arguments, memory, limit))
    chosen = best(tried)
    changes = sizes.changes(chosen.batch_size)
    words = ", ".join(f"{key.replace('.init_args', '')} {value}" for key, value in changes.items())
    say(f"Batch size {chosen.batch_size}: " + (
        f"{words}; every step has the same rows as before." if changes else
        "the recipe's own is as fast as any that fits and leaves the rows of a step as they are."))
    if changes and recipe["data"]["init_args"].get("group_by_length"):
        say("data.group_by_length sorts the rows of 50 batches at a time, so their order changes with the batch size.")
    if changes:
        files.put(changes, write)
    return changes


def _measure(sizes: Sizes, size: int, arguments: list[str], memory: float | None, limit: float) -> Measured:
    """Measure the step of a batch size in a separate process.

    Args:
        memory: GiB that the user allows; None is all that is available.
        limit: GiB of this machine's memory at which the process is killed.
    """
    # Two micro-batches need as much memory as more of them.
    changes = sizes.changes(size) | {"trainer.accumulate_grad_batches": min(2, sizes.accumulated(size))}
    with tempfile.TemporaryDirectory() as folder:
        log, result = Path(folder) / "log", Path(folder) / "step.json"
        words = [*arguments, *_words(changes), "--what", "step", "--write", "false", "--result", str(result)]
        status, peak = _watched(words, log, limit)
        if status == 0:
            found = json.loads(result.read_text())
            on_device = found["on_device"]
            used, room = (found["memory"], math.inf) if on_device else (max(peak, found["memory"]), limit)
            room = memory or room
            needs = measured_memory(used * GIB, room * GIB)
            problem = "" if needs.fits else f"needs {used:.1f} of {room:.1f} GiB"
            measured = Measured(size, found["tokens_per_second"], needs, problem)
        elif peak > limit:
            measured = Measured(size, 0.0, measured_memory(peak * GIB, limit * GIB),
                                f"needs more than {limit:.1f} GiB")
        elif status < 0 or last_error(log).startswith("Out of memory"):
            measured = Measured(size, problem="out of memory")
        else:
            raise UserError(f"A step with data.batch_size {size} fails: {last_error(log)}")
    say(f"batch size {size:>5}: " + (measured.problem or f"{measured.tokens_per_second:,.0f} tokens per second, "
                                                        f"{measured.memory}"))
    return measured


def _watched(arguments: list[str], log: Path, limit: float) -> tuple[int, float]:
    """Run a command, killing it above `limit`, and return its exit status and the peak GiB of it and its children."""
    most = 0.0
    with started(arguments, log) as process:
        while process.poll() is None:
            most = max(most, _held(process.pid))
            if most > limit:
                _kill(process.pid)
            time.sleep(0.05)
    return process.returncode, most


def _family(pid: int) -> list[psutil.Process]:
    """Return a process and its children."""
    try:
        return [process := psutil.Process(pid), *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def _held(pid: int) -> float:
    """Return the memory of a process and its children in GiB."""
    total = 0
    for each in _family(pid):
        with suppress(psutil.NoSuchProcess):
            total += each.memory_info().rss
    return total / GIB


def _kill(pid: int) -> None:
    for each in _family(pid):
        with suppress(psutil.NoSuchProcess):
            each.kill()


def _words(changes: dict[str, int]) -> list[str]:
    return [word for key, value in changes.items() for word in (f"--{key}", str(value))]


def free_memory() -> float:
    """Return the free memory of this machine or its container in GiB."""
    free = psutil.virtual_memory().available
    with suppress(OSError, ValueError):  # not in a cgroup, or without a limit
        free = min(free, int(CGROUP.read_text()) - int((CGROUP.parent / "memory.current").read_text()))
    return free / GIB


# ---------------------------------------------------------------------------------------------------------------------
# `find` within an engine: dry-run a recipe and measure the learning rate or the cost of a step.

# Keys of `trainer` that a dry run overrides.
UNSEEN = {"max_epochs": -1, "min_epochs": None, "min_steps": None, "max_time": None, "fast_dev_run": False,
          "profiler": None, "barebones": False, "callbacks": None, "enable_checkpointing": False,
          "enable_progress_bar": False, "limit_val_batches": 0, "num_sanity_val_steps": 0, "val_check_interval": None,
          "check_val_every_n_epoch": 10**9}


def unseen(parsed: Recipe, **trainer: Any) -> "Setup":
    """Build a recipe for a dry run: nothing is logged, sampled or saved, and no folder is created."""
    from lmmods.commands.setup import Setup

    names = keys_of(parsed.kind("trainer"))
    changes = {name: value for name, value in (UNSEEN | trainer).items() if name in names}
    given = parsed.given | dict.fromkeys(BLOCKS, {}) | {"trainer": parsed.given["trainer"] | changes}
    return Setup(replace(parsed, given=given))


def find_rate(parsed: Recipe, test: RangeTest, plot: str, write: bool, result: str | None) -> None:
    """Run the range test, draw it, and print or write the rate that it suggests."""
    files = RecipeFiles([parsed.command, *parsed.words])
    if write:
        files.check(["model.init_args.optimizer.lr"])
    with unseen(parsed, max_steps=test.num_steps) as setup:
        _range_test(setup, test)
        if not setup.trainer.is_global_zero:
            return
        try:
            suggestion = test.suggestion()
        finally:
            draw(test, Path(plot))
    say(f"Learning rate {suggestion:g}: there the loss falls fastest over {len(test.rates)} steps from "
        f"{test.rates[0]:.2g} to {test.rates[-1]:.2g}. It is the peak, for `model.optimizer.lr`. Curve: {plot}")
    if result:
        write_json(Path(result), {"lr": suggestion, "rates": test.rates, "losses": test.losses,
                                  "smoothed": test.smoothed, "diverged": test.diverged})
    files.put({"model.init_args.optimizer.lr": suggestion}, write)


def _range_test(setup: "Setup", test: RangeTest) -> None:
    setup.model.optimizer = test.ramp(setup.model.optimizer)
    bar = Bar(setup.trainer.is_global_zero)
    bar.open("range test", test.num_steps)

    def watch(figures: dict[str, float]) -> bool:
        over, done = test.add(figures), len(test.rates)
        shown = done % 10 == 0 and not over
        bar.update(done, f"lr {test.rates[-1]:.2g}  loss {test.smoothed[-1]:.4g}" if shown else "")
        return over

    try:
        dry_run(setup, watch)
    except NotFinite:
        test.diverged = True
    finally:
        bar.close()


def measure_step(parsed: Recipe, result: str | None) -> None:
    """Measure a step of the recipe as it is, on its longest rows."""
    probe = StepProbe()
    with unseen(parsed, max_steps=probe.num_steps, limit_val_batches=1, num_sanity_val_steps=1) as setup:
        datamodule = setup.datamodule
        datamodule.longest_first = True
        if datamodule.streaming:  # the longest rows are unknown when streaming
            datamodule.pad_to_multiple_of = datamodule.max_length
        on_device = dry_run(setup, probe.add)
    if not setup.trainer.is_global_zero:
        return
    memory = measured_memory(on_device or peak_of_process(), math.inf)
    found = {**probe.found(), "memory": memory.needed / GIB, "on_device": on_device is not None}
    if result:
        write_json(Path(result), found)
    where = "on the first device" if found["on_device"] else "of this machine"
    say(f"A step of {datamodule.batch_size} × {setup.trainer.accumulate_grad_batches} of the longest rows takes "
        f"{found['seconds_per_step']:.3g} s ({found['tokens_per_second']:,.0f} tokens per second). Memory {where}: "
        f"{memory}.")


def peak_of_process() -> int:
    """Return the peak memory of this process so far in bytes."""
    if sys.platform == "win32":
        return psutil.Process().memory_info().peak_wset
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


# ---------------------------------------------------------------------------------------------------------------------
# Writing values back into recipe files: only the values' own characters change, so comments and layout stay.

Value = int | float


class RecipeFiles:
    """Recipe files named by a command line's `--config` options, later ones overriding earlier ones.

    Keys are dotted paths as in a file, for example `model.init_args.optimizer.lr`.
    """

    def __init__(self, arguments: list[str]) -> None:
        self._arguments = arguments
        # Inline recipes cannot be written back.
        self._paths = [Path(value) for value in option_values(arguments, *CONFIG_OPTIONS) if _is_file(value)]

    def check(self, keys: list[str]) -> None:
        """Raise UserError if a value of one of these keys could not be written."""
        self._edited(dict.fromkeys(keys, 1))

    def put(self, found: dict[str, Value], write: bool) -> None:
        """Write the found values into the files, or only print what would be written.

        Raises:
            UserError: As `check`.
        """
        if not write:
            shown = " ".join(f"--{key.replace('.init_args', '')} {as_text(value)}" for key, value in found.items())
            return say(f"Nothing was written: give {shown}, or let find do it with --write true.")
        for path, text in self._edited(found).items():
            write_text(path.resolve(), text)  # keeps a symbolic link intact
        for key, value in found.items():
            say(f"Wrote {key.replace('.init_args', '')}: {as_text(value)} to {self._file_of(key)}.")

    def _edited(self, found: dict[str, Value]) -> dict[Path, str]:
        texts: dict[Path, str] = {}
        for key, value in found.items():
            path = self._file_of(key)
            texts[path] = edited(texts.get(path) or read_text(path), key, value, str(path))
        return texts

    def _file_of(self, key: str) -> Path:
        """Return the last file that has the key, or else the last one that has its parent mapping."""
        short = key.replace(".init_args", "")
        typed = {f"--{name}" for name in (key, short)}
        if given := next((word for word in self._arguments if word.partition("=")[0] in typed), None):
            raise UserError(f"--write true: {short} is given on the command line ({given}), which overrides the "
                            "recipe's files. Take it out, or leave --write away.")
        for keys in (key.split("."), key.split(".")[:-1]):
            holding = [path for path in self._paths if _holds(read_recipe(path), keys, keys == key.split("."))]
            if holding:
                if (holding[-1].parent / LIST).exists():
                    raise UserError(f"--write true: {holding[-1]} belongs to a run, whose files find leaves alone. "
                                    "Copy it to a recipe of your own.")
                return holding[-1]
        raise UserError(f"--write true: no recipe file has a place for {key}. Add the key to a file, with any value.")


def edited(text: str, key: str, value: Value, name: str) -> str:
    """Return a recipe's text with a new value of a key; the key or its parent mapping must exist in it.

    Args:
        name: File name for messages.

    Raises:
        UserError: The value is also used elsewhere in the file, or is not a scalar.
    """
    *parents, leaf = key.split(".")
    root = yaml.compose(text, Loader=yaml.SafeLoader)
    uses = Counter(map(id, _nodes(root)))
    node, on_the_way = root, [root]
    for part in parents:
        node = _child(node, part)
        on_the_way.append(node)
    old = _child(node, leaf)
    on_the_way += [old] if old is not None else []
    line = on_the_way[-1].start_mark.line + 1
    if any(uses[id(each)] > 1 for each in on_the_way):
        raise UserError(f"--write true: {name}:{line}: {key} is at an anchor (&) that another place repeats "
                        "(*), and would change there too. Write it out.")
    if old is None and node.value:
        first = node.value[0][0].start_mark
        start = end = first.index
        new = f"{leaf}: {as_text(value)}" + (", " if node.flow_style else "\n" + " " * first.column)
    elif isinstance(old, yaml.ScalarNode):
        start, end, new = old.start_mark.index, old.end_mark.index, as_text(value)
    else:
        raise UserError(f"--write true: {name}:{line}: {key} is no single value that could be replaced.")
    result = text[:start] + new + text[end:]
    wanted = _load(text)
    _set(wanted, key.split("."), value)
    if _load(result) != wanted:
        raise UserError(f"--write true: {name}:{line}: {key} cannot be replaced without changing what surrounds "
                        f"it. Write {as_text(value)} there by hand.")
    return result


def as_text(value: Value) -> str:
    """Format a number for YAML 1.1: 3.2e-4, not 3.2e-04 or 0.00032."""
    if isinstance(value, int):
        return str(value)
    return re.sub(r"e([+-])0*(\d)", r"e\1\2", f"{value:.1e}")


def _is_file(value: str) -> bool:
    try:
        return Path(value).is_file()
    except (OSError, ValueError):
        return False


def _holds(content: Any, keys: list[str], is_value: bool) -> bool:
    for key in keys:
        if not isinstance(content, dict) or key not in content:
            return False
        content = content[key]
    return is_value or isinstance(content, dict) and bool(content)


def _child(node: yaml.MappingNode, key: str) -> yaml.Node | None:
    return next((value for name, value in node.value if name.value == key), None)


def _nodes(node: yaml.Node) -> Iterator[yaml.Node]:
    """Yield every node; an anchored one as often as it is referenced."""
    yield node
    for each in node.value if isinstance(node, yaml.CollectionNode) else ():
        for child in each if isinstance(each, tuple) else (each,):
            yield from _nodes(child)


def _load(text: str) -> Any:
    return yaml.load(text, Loader=RecipeLoader)


def _set(content: dict[str, Any], keys: list[str], value: Value) -> None:
    for key in keys[:-1]:
        content = content[key]
    content[keys[-1]] = value


# ---------------------------------------------------------------------------------------------------------------------
# Plot of a range test.

AUTHOR = "lmmods find"  # author tag that identifies our plots


def check_replaceable(path: Path) -> None:
    """Raise UserError if the plot would replace a file that is not one of our plots, or its folder is missing."""
    check_place("--plot", path)
    if path.exists():
        with open(path, "rb") as file:
            head = file.read(4096)
        if AUTHOR.encode() not in head:
            raise UserError(f"--plot {path} is there and is no picture of a range test. Choose another file.")


def draw(test: RangeTest, path: Path) -> None:
    """Plot the losses over the learning rates, with the suggestion if there is one."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    axes.plot(test.rates, test.losses, linewidth=0.6, alpha=0.5, label="loss of the step")
    axes.plot(test.rates, test.smoothed, linewidth=1.6, label="smoothed")
    try:
        axes.axvline(test.suggestion(), linestyle="--", color="black", label=f"suggestion {test.suggestion():g}")
    except UserError:
        axes.set_title("no suggestion")
    if test.smoothed:
        lowest, highest = min(test.smoothed), max(test.smoothed[: max(len(test.smoothed) // 2, 1)])
        margin = 0.3 * max(highest - lowest, 0.1 * abs(highest))
        axes.set_ylim(lowest - margin, highest + margin)  # the diverging end would flatten the rest
    axes.set_xscale("log")
    axes.set_xlabel("learning rate")
    axes.set_ylabel("loss (nats per token)")
    axes.legend()
    figure.savefig(path, dpi=120, format="png", metadata={"Software": AUTHOR})


# ---------------------------------------------------------------------------------------------------------------------
# Time and throughput of an optimiser step, averaged over a few steps.

@dataclass
class StepProbe:
    """Timer of steps; excludes the first one, in which programs are compiled and buffers allocated.

    Args:
        num_steps: Number of steps, 2 or more.
    """

    num_steps: int = 4
    ends: list[float] = field(default_factory=list)
    tokens: list[float] = field(default_factory=list)

    def add(self, figures: dict[str, float]) -> bool:
        """Record a step finished on the device; `num_tokens` are its real tokens. Return whether it was the last."""
        self.ends.append(time.perf_counter())
        self.tokens.append(figures["num_tokens"])
        return len(self.ends) == self.num_steps

    def found(self) -> dict[str, Any]:
        """Return the seconds per step and real tokens per second."""
        seconds = self.ends[-1] - self.ends[0]
        return {"seconds_per_step": seconds / (len(self.ends) - 1), "tokens_per_second": sum(self.tokens[1:]) / seconds}
