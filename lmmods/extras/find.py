"""`find`: find a learning rate and the fastest batch size that fits, and print the lines of the recipe to change."""

import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import psutil

from lmmods.commands.programs import command, last_error, run_program
from lmmods.core.console import say
from lmmods.core.errors import UserError
from lmmods.core.files import check_output_path
from lmmods.core.memory import GIB, StepMemory
from lmmods.core.progress_bar import Bar
from lmmods.core.settings import Optimizer, require
from lmmods.extras.dry_run import dry_run
from lmmods.recipe.files import as_yaml
from lmmods.recipe.reader import Recipe, with_library_classes
from lmmods.runs.run_files import write_json
from lmmods.runs.step_metrics import NotFinite


def find(parsed: Recipe, what: Literal["lr", "batch_size", "both", "step"] = "both", steps: int = 100,
         min_lr: float = 1e-7, max_lr: float = 1.0, memory: float | None = None, plot: str = "lr.png",
         result: str | None = None) -> None:
    """Find a learning rate and the fastest batch size that fits, and print the lines of the recipe to change.

    Needs no run folder and creates none.

    Args:
        what: `lr`: a range test. `batch_size`: the fastest that fits, with the same rows in each optimiser step.
            `both`: the batch size, then the learning rate. `step`: only measure a step on the recipe's longest rows.
        steps: Optimiser steps of the range test.
        min_lr: Learning rate of its first step.
        max_lr: Learning rate of its last step, unless the loss diverges before.
        memory: Maximum GiB of a batch, on each GPU or else of this machine. Default: what is free.
        plot: File for the plot of the range test.
        result: File for the results, as JSON.

    Raises:
        UserError: The options or the recipe are wrong, nothing fits, or nothing can be suggested.
    """
    require(memory is None or memory > 0, "--memory", memory, "GiB, more than 0")
    if result:
        check_output_path("--result", Path(result))
    if what in ("lr", "both"):
        task = parsed.fields_class("model")
        if not getattr(task, "loss_falls", True):
            name = task.__name__.removesuffix("Fields")
            raise UserError(f"find --what {what}: the loss of {name} does not fall as the model improves, so it "
                            "cannot suggest a learning rate. Use --what batch_size, and compare rates by "
                            f"{task.ranked_by[0]} with python train.py sweep.")
        test = RangeTest(min_lr, max_lr, steps)
        check_replaceable(Path(plot))
    if what == "lr":
        return find_rate(parsed, test, plot, result)
    if what == "step":
        return measure_step(parsed, result)
    arguments = [parsed.command, *parsed.words]
    changes = _find_batch_size(parsed, arguments, memory)
    results: dict[str, Any] = {key.rsplit(".", 1)[-1]: value for key, value in changes.items()}
    if what == "both":
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "lr.json"
            # In a separate process, as the engine may launch further processes by repeating its command line.
            words = [*arguments, *_to_options(changes), "--what", "lr", "--result", str(path)]
            if status := subprocess.run(command(words)).returncode:
                raise SystemExit(status)
            results |= json.loads(path.read_text())
    if result:
        write_json(Path(result), results)


def print_changes(changes: dict[str, int | float]) -> None:
    """Print dotted recipe keys and their values as lines of a recipe."""
    tree: dict[str, Any] = {}
    for key, value in changes.items():
        *blocks, name = key.split(".")
        inner = tree
        for block in blocks:
            inner = inner.setdefault(block, {})
        inner[name] = value
    say(f"Set in the recipe:\n\n{as_yaml(tree)}")


# ---------------------------------------------------------------------------------------------------------------------
# Learning rate range test: a short training whose rate rises until the loss diverges (Smith 2015).
#
# Source: L. N. Smith, Cyclical Learning Rates for Training Neural Networks, arXiv:1506.01186, section 3.3. Smoothing,
# the divergence criterion and the suggestion at the steepest descent follow fast.ai's `lr_find` and Lightning's
# LearningRateFinder, except for how the slope is measured: batches of text vary so much that the difference of two
# smoothed losses is mostly noise, so a line is fitted to a window of steps, and its slope must be clearly negative.

SMOOTHING = 0.98  # decay of the running mean of the loss
DIVERGENCE = 4.0  # factor over the lowest smoothed loss at which the test ends
WINDOW = 8  # a line is fitted to a quarter of the steps: 1/WINDOW of them on each side
SIGNIFICANCE = 3.0  # number of standard errors by which the slope must be below zero
MIN_STEPS = 20


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
    has_diverged: bool = False

    def __post_init__(self) -> None:
        require(self.num_steps >= MIN_STEPS, "--steps", self.num_steps, f"{MIN_STEPS} or more")
        require(0 < self.min_lr < self.max_lr < math.inf, "--min_lr", self.min_lr, "above 0 and below --max_lr")
        self._mean = 0.0

    def ramp(self, optimizer: Optimizer) -> Ramp:
        """Return a recipe's optimiser with the ramp as its schedule."""
        return Ramp(optimizer, self.min_lr, self.max_lr)

    def add(self, metrics: dict[str, float]) -> bool:
        """Record the `lr` and `loss` of an optimiser step and return whether the test is over."""
        if self.has_diverged:
            return True
        loss = metrics["loss"]
        if not math.isfinite(loss):
            self.has_diverged = True
            return True
        self.rates.append(metrics["lr"])
        self.losses.append(loss)
        self._mean = SMOOTHING * self._mean + (1 - SMOOTHING) * loss
        self.smoothed.append(self._mean / (1 - SMOOTHING ** len(self.losses)))
        self.has_diverged = len(self.losses) > 1 and self.smoothed[-1] > DIVERGENCE * min(self.smoothed)
        return self.has_diverged or len(self.losses) == self.num_steps

    def suggest_lr(self) -> float:
        """Return the rate of the steepest loss descent over log(rate), rounded to two digits.

        Raises:
            UserError: The loss never falls clearly, or it diverged after too few steps.
        """
        half = self.num_steps // WINDOW
        last = min(int(np.argmin(self.smoothed)) if self.smoothed else 0, len(self.losses) - 1 - half)
        if last < half:
            raise UserError(f"The loss diverged or stopped falling within {len(self.losses)} of {self.num_steps} "
                            "steps, too early to find a learning rate. Lower --min_lr or raise --steps.")
        fits = {}
        for centre in range(half, last + 1):
            losses = self.losses[centre - half : centre + half + 1]  # the logarithms of the rates are evenly spaced
            (slope, _), covariance = np.polyfit(range(-half, half + 1), losses, 1, cov=True)
            fits[centre] = slope, math.sqrt(covariance[0, 0])
        steepest = min(fits, key=lambda centre: fits[centre][0])
        slope, error = fits[steepest]
        if slope >= -SIGNIFICANCE * error:
            raise UserError(f"The loss does not fall clearly between learning rates of {self.min_lr:g} and "
                            f"{self.rates[-1]:.2g}: the noise between batches is larger. Raise --steps. A model "
                            "that is already trained may have nothing left to learn from these rows.")
        return float(f"{self.rates[steepest]:.1e}")


def find_rate(parsed: Recipe, test: RangeTest, plot: str, result: str | None) -> None:
    """Run the range test, plot it, and print the rate that it suggests."""
    from lmmods.commands.setup import dry_setup

    with dry_setup(parsed, max_steps=test.num_steps) as setup:
        setup.model.optimizer = test.ramp(setup.model.optimizer)
        bar = Bar(setup.trainer.is_global_zero)
        bar.open("range test", test.num_steps)

        def watch(metrics: dict[str, float]) -> bool:
            is_over, done = test.add(metrics), len(test.rates)
            is_shown = done % 10 == 0 and not is_over
            bar.update(done, f"lr {test.rates[-1]:.2g}  loss {test.smoothed[-1]:.4g}" if is_shown else "")
            return is_over

        try:
            dry_run(setup, watch)
        except NotFinite:
            test.has_diverged = True
        finally:
            bar.close()
        if not setup.trainer.is_global_zero:
            return
        try:
            lr = test.suggest_lr()
        finally:
            plot_range_test(test, Path(plot))
    say(f"Learning rate {lr:g}: the loss falls fastest there, over {len(test.rates)} steps from {test.rates[0]:.2g} to "
        f"{test.rates[-1]:.2g}. Use it as the peak rate of a schedule. Plot: {plot}")
    print_changes({"model.init_args.optimizer.lr": lr})
    if result:
        write_json(Path(result), {"lr": lr, "rates": test.rates, "losses": test.losses,
                                  "smoothed": test.smoothed, "diverged": test.has_diverged})


AUTHOR = "lmmods find"  # author tag that identifies our plots


def check_replaceable(path: Path) -> None:
    """Raise UserError if the plot would replace a file that is not one of our plots, or its folder is missing."""
    check_output_path("--plot", path)
    if path.exists():
        with open(path, "rb") as file:
            head = file.read(4096)
        if AUTHOR.encode() not in head:
            raise UserError(f"--plot {path} exists and is not the plot of a range test. Choose another file.")


def plot_range_test(test: RangeTest, path: Path) -> None:
    """Plot the losses over the learning rates, with the suggestion if there is one."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    axes.plot(test.rates, test.losses, linewidth=0.6, alpha=0.5, label="step loss")
    axes.plot(test.rates, test.smoothed, linewidth=1.6, label="smoothed")
    try:
        axes.axvline(test.suggest_lr(), linestyle="--", color="black", label=f"suggestion {test.suggest_lr():g}")
    except UserError:
        axes.set_title("no suggestion")
    if test.smoothed:
        lowest, highest = min(test.smoothed), max(test.smoothed[: max(len(test.smoothed) // 2, 1)])
        margin = 0.3 * max(highest - lowest, 0.1 * abs(highest))
        axes.set_ylim(lowest - margin, highest + margin)  # the diverging end would flatten the rest
    axes.set(xscale="log", xlabel="learning rate", ylabel="loss (nats per token)")
    axes.legend()
    figure.savefig(path, dpi=120, format="png", metadata={"Software": AUTHOR})


# ---------------------------------------------------------------------------------------------------------------------
# Fastest batch size that fits, by steps measured in separate processes.
#
# Only sizes that divide the rows of an optimiser step are tried, with gradient accumulation making up the rest, so
# that the optimiser steps of the run stay the same.

MIN_SPEEDUP = 1.03  # minimum speed-up that justifies a larger batch's memory
FREE_FRACTION = 0.85  # maximum fraction of this machine's free memory that a search may use
CGROUP = Path("/sys/fs/cgroup/memory.max")
# Keys counted in training micro-batches; they scale with the micro-batch size.
COUNTED = ("limit_train_batches", "overfit_batches")
EVALUATED = ("limit_val_batches", "limit_test_batches", "limit_predict_batches")


@dataclass(frozen=True)
class Measurement:
    """Measurement of a step with a batch size.

    Args:
        tokens_per_second: Real (non-padding) tokens, with the longest rows; 0 if it did not fit.
        problem: Why it does not fit; empty if it does.
    """

    batch_size: int
    tokens_per_second: float = 0.0
    problem: str = ""


class Sizes:
    """Batch sizes that leave a recipe's optimiser steps unchanged, and the keys that each one sets.

    Args:
        recipe: Plain values of the recipe.
    """

    def __init__(self, recipe: dict[str, Any]) -> None:
        trainer, data = recipe["trainer"], recipe["data"]["init_args"]
        self.current: int = data["batch_size"]
        self._rows: int = data["batch_size"] * trainer["accumulate_grad_batches"]
        self._counts = {f"trainer.{key}": trainer[key] for key in COUNTED
                        if isinstance(trainer.get(key), int) and trainer[key]}
        is_limited = any(isinstance(trainer.get(key), int) and trainer[key] for key in EVALUATED)
        self._eval_size = self.current if is_limited and data.get("eval_batch_size") is None else None

    def candidates(self) -> list[int]:
        """Return the sizes in ascending order, including the recipe's."""
        return [size for size in range(1, self._rows + 1) if self._rows % size == 0
                and all(count * self.current % size == 0 for count in self._counts.values())]

    def num_micro_batches(self, size: int) -> int:
        """Return the number of micro-batches per step."""
        return self._rows // size

    def changes(self, size: int) -> dict[str, int]:
        """Return the recipe keys that a size sets, with their values."""
        if size == self.current:
            return {}
        counts = {key: count * self.current // size for key, count in self._counts.items()}
        eval_size = {"data.init_args.eval_batch_size": self._eval_size} if self._eval_size else {}
        return {"data.init_args.batch_size": size,
                "trainer.accumulate_grad_batches": self.num_micro_batches(size), **counts, **eval_size}


def search(sizes: list[int], current: int, measure: Callable[[int], Measurement]) -> list[Measurement]:
    """Measure sizes from `current`: double while it fits and gets faster, halve until it fits, then bisect in between.

    Args:
        sizes: Ascending sizes.

    Returns:
        The measurements in the order they were made.
    """
    measurements = [measure(current)]
    low, high = current, None  # maximum that fits, minimum that does not
    while measurements[-1].problem:
        high = measurements[-1].batch_size
        smaller = [size for size in sizes if size <= high // 2] or [size for size in sizes if size < high]
        if not smaller:
            return measurements
        low = smaller[-1]
        measurements.append(measure(low))
    while high is None and (larger := [size for size in sizes if size >= 2 * low]
                            or [size for size in sizes if size > low]):
        before, after = measurements[-1], measure(larger[0])
        measurements.append(after)
        if after.problem:
            high = after.batch_size
        elif after.tokens_per_second < MIN_SPEEDUP * before.tokens_per_second:
            return measurements
        else:
            low = after.batch_size
    while high is not None and (between := [size for size in sizes if low < size < high]):
        measurements.append(measure(between[len(between) // 2]))
        if measurements[-1].problem:
            high = measurements[-1].batch_size
        else:
            low = measurements[-1].batch_size
    return measurements


def choose_best(measurements: list[Measurement]) -> Measurement:
    """Return the fastest that fits, the smallest among those about as fast. Raises UserError: none fits."""
    fitting = sorted((measurement for measurement in measurements if not measurement.problem),
                     key=lambda measurement: measurement.batch_size)
    if not fitting:
        smallest = min(measurements, key=lambda measurement: measurement.batch_size)
        raise UserError(f"Not even a batch of {smallest.batch_size} fits ({smallest.problem}). Lower data.max_length, "
                        "set model.gradient_checkpointing, or train an adapter on a quantised base.")
    fastest = max(measurement.tokens_per_second for measurement in fitting)
    return next(measurement for measurement in fitting if MIN_SPEEDUP * measurement.tokens_per_second >= fastest)


def _find_batch_size(parsed: Recipe, arguments: list[str], memory: float | None) -> dict[str, int]:
    """Return the keys that the best batch size changes; empty if the recipe has it already."""
    recipe = with_library_classes(parsed).whole()
    if recipe["trainer"]["num_nodes"] > 1 or "LOCAL_RANK" in os.environ:
        raise UserError("find starts its own processes to measure batch sizes. Run it on one machine, without a "
                        "launcher.")
    sizes, limit = Sizes(recipe), free_memory() * FREE_FRACTION
    measurements = search(sizes.candidates(), sizes.current,
                          lambda size: _measure(sizes, size, arguments, memory, limit))
    batch_size = choose_best(measurements).batch_size
    changes = sizes.changes(batch_size)
    say(f"Batch size {batch_size}: " + ("every step has the same rows as before." if changes else
        "no other size that fits and keeps the rows of each step is clearly faster."))
    if changes:
        if recipe["data"]["init_args"].get("group_by_length"):
            say("data.group_by_length sorts the rows of 50 batches at a time, so their order changes with the batch "
                "size.")
        print_changes(changes)
    return changes


def _measure(sizes: Sizes, size: int, arguments: list[str], memory: float | None, limit: float) -> Measurement:
    """Measure the step of a batch size in a separate process.

    Args:
        memory: Maximum GiB set by the user; None allows all that is available.
        limit: GiB of this machine's memory above which the process is killed.
    """
    # More than two micro-batches need no more memory.
    changes = sizes.changes(size) | {"trainer.accumulate_grad_batches": min(2, sizes.num_micro_batches(size))}
    with tempfile.TemporaryDirectory() as folder:
        log, path = Path(folder) / "log", Path(folder) / "step.json"
        words = [*arguments, *_to_options(changes), "--what", "step", "--result", str(path)]
        status, peak = _run_with_limit(words, log, limit)
        measurement, note = Measurement(size, problem=f"needs more than {limit:.1f} GiB"), ""
        if status == 0:
            step = json.loads(path.read_text())
            used, available = (step["memory"], math.inf) if step["on_device"] else (max(peak, step["memory"]), limit)
            available = memory or available
            note = f", {step_memory(used * GIB, available * GIB)}"
            measurement = (Measurement(size, step["tokens_per_second"]) if used <= available else
                           Measurement(size, problem=f"needs {used:.1f} of {available:.1f} GiB"))
        elif peak <= limit:
            if status > 0 and not last_error(log).startswith("Out of memory"):
                raise UserError(f"A step with data.batch_size {size} fails: {last_error(log)}")
            measurement = Measurement(size, problem="out of memory")
    say(f"batch size {size:>5}: " + (measurement.problem or
                                     f"{measurement.tokens_per_second:,.0f} tokens per second{note}"))
    return measurement


def _run_with_limit(arguments: list[str], log: Path, limit: float) -> tuple[int, float]:
    """Run a command, killing it above `limit`, and return its exit status and the peak GiB of it and its children."""
    peak = 0.0
    with run_program(arguments, log) as process:
        while process.poll() is None:
            processes, num_bytes = [], 0
            with suppress(psutil.NoSuchProcess):
                parent = psutil.Process(process.pid)
                processes = [parent, *parent.children(recursive=True)]
            for member in processes:
                with suppress(psutil.NoSuchProcess):
                    num_bytes += member.memory_info().rss
            peak = max(peak, num_bytes / GIB)
            for member in processes if peak > limit else ():
                with suppress(psutil.NoSuchProcess):
                    member.kill()
            time.sleep(0.05)
    return process.returncode, peak


def _to_options(changes: dict[str, int]) -> list[str]:
    return [word for key, value in changes.items() for word in (f"--{key}", str(value))]


def free_memory() -> float:
    """Return the free memory of this machine or its container in GiB."""
    free = psutil.virtual_memory().available
    with suppress(OSError, ValueError):  # not in a cgroup, or without a limit
        free = min(free, int(CGROUP.read_text()) - int((CGROUP.parent / "memory.current").read_text()))
    return free / GIB


# ---------------------------------------------------------------------------------------------------------------------
# `--what step`: time, throughput and memory of an optimiser step.

MEASURED_STEPS = 4  # the first is not timed: it compiles programs and allocates buffers


def measure_step(parsed: Recipe, result: str | None) -> None:
    """Measure an optimiser step of the unchanged recipe on its longest rows."""
    from lmmods.commands.setup import dry_setup

    end_times: list[float] = []
    tokens: list[float] = []  # without padding

    def watch(metrics: dict[str, float]) -> bool:
        end_times.append(time.perf_counter())
        tokens.append(metrics["num_tokens"])
        return len(end_times) == MEASURED_STEPS

    with dry_setup(parsed, True, max_steps=MEASURED_STEPS, limit_val_batches=1, num_sanity_val_steps=1) as setup:
        datamodule = setup.datamodule
        on_device = dry_run(setup, watch)
    if not setup.trainer.is_global_zero:
        return
    memory, seconds = step_memory(on_device or peak_process_memory(), math.inf), end_times[-1] - end_times[0]
    step = {"seconds_per_step": seconds / (len(end_times) - 1), "tokens_per_second": sum(tokens[1:]) / seconds,
            "memory": memory.needed / GIB, "on_device": on_device is not None}
    if result:
        write_json(Path(result), step)
    location = "on the first device" if step["on_device"] else "of this machine"
    say(f"A step of {datamodule.batch_size} × {setup.trainer.accumulate_grad_batches} of the longest rows takes "
        f"{step['seconds_per_step']:.3g} s ({step['tokens_per_second']:,.0f} tokens per second). Memory {location}: "
        f"{memory}.")


def step_memory(peak: float, available: float) -> StepMemory:
    """Return the memory of a step whose peak was measured; both in bytes."""
    return StepMemory({"peak": peak}, available, "measured")


def peak_process_memory() -> int:
    """Return the peak memory of this process so far in bytes."""
    if sys.platform == "win32":
        return psutil.Process().memory_info().peak_wset
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
