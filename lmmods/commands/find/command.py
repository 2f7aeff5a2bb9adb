"""`find`: the learning rate and the batch size for a recipe."""

import json
import math
import os
import subprocess
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from lmmods.commands.command_line import CommandLine, RecipeTypes
from lmmods.commands.find.batch_size import Measured, Sizes, best, search
from lmmods.commands.find.measuring import Finder
from lmmods.commands.find.plot import check_replaceable
from lmmods.commands.find.recipe_file import RecipeFiles
from lmmods.commands.programs import command, last_error, started
from lmmods.core.console import say
from lmmods.core.errors import UserError
from lmmods.core.files import check_place
from lmmods.core.range_test import RangeTest
from lmmods.core.settings import require
from lmmods.runs.atomic import write_json

GIB = 2**30
SHARE = 0.85  # of the free memory of this machine that a search may fill
CGROUP = Path("/sys/fs/cgroup/memory.max")


def find(types: RecipeTypes, engine: str, arguments: list[str]) -> None:
    """Perform `find`, whose options are those of `EngineCommands.find`.

    Raises:
        UserError: The options or the recipe are wrong, nothing fits, or nothing can be suggested.
    """
    recipe = CommandLine(types, engine, arguments).parse(arguments).find
    require(recipe.memory is None or recipe.memory > 0, "--memory", recipe.memory, "GiB, more than 0")
    if recipe.result:
        check_place("--result", Path(recipe.result))
    if recipe.what in ("lr", "both"):
        RangeTest(recipe.min_lr, recipe.max_lr, recipe.steps)
        check_replaceable(Path(recipe.plot))
    if recipe.what in ("lr", "step"):
        Finder(types, engine, arguments)
        return
    changes = _find_batch_size(recipe, arguments)
    found: dict[str, Any] = {key.rsplit(".", 1)[-1]: value for key, value in changes.items()}
    if recipe.what == "both":
        with tempfile.TemporaryDirectory() as folder:
            result = Path(folder) / "lr.json"
            words = [*arguments, *([] if recipe.write else _words(changes)), "--what", "lr", "--result", str(result)]
            # A process of its own, as the engine may start further ones by repeating its command line.
            if status := subprocess.run(command(words)).returncode:
                raise SystemExit(status)
            found |= json.loads(result.read_text())
    if recipe.result:
        write_json(Path(recipe.result), found)


def _find_batch_size(recipe: Any, arguments: list[str]) -> dict[str, int]:
    """The keys that the best batch size changes, written if asked for; empty where it is the recipe's own."""
    if recipe.trainer.num_nodes > 1 or "LOCAL_RANK" in os.environ:
        raise UserError("find starts processes of its own to measure batch sizes: run it on one machine, without a "
                        "launcher.")
    sizes, files = Sizes(recipe), RecipeFiles(arguments)
    if recipe.write:
        files.check(list(sizes.changes(next((size for size in sizes.all() if size != sizes.now), sizes.now))))
    limit = free_memory() * SHARE
    tried = search(sizes.all(), sizes.now, lambda size: _measure(sizes, size, arguments, recipe.memory, limit))
    chosen = best(tried)
    changes = sizes.changes(chosen.batch_size)
    words = ", ".join(f"{key.replace('.init_args', '')} {value}" for key, value in changes.items())
    say(f"Batch size {chosen.batch_size}: " + (
        f"{words}; every step has the same rows as before." if changes else
        "the recipe's own is as fast as any that fits and leaves the rows of a step as they are."))
    if changes and recipe.data.init_args.get("group_by_length"):
        say("data.group_by_length sorts the rows of 50 batches at a time, so their order changes with the batch size.")
    if changes:
        files.put(changes, recipe.write)
    return changes


def _measure(sizes: Sizes, size: int, arguments: list[str], memory: float | None, limit: float) -> Measured:
    """Measure the step of a batch size in a process of its own.

    Args:
        memory: GiB that the user allows; None is what there is.
        limit: GiB of this machine at which the process is ended.
    """
    # Two micro-batches need what more of them would.
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
            problem = f"needs {used:.1f} of {room:.1f} GiB" if used > room else ""
            measured = Measured(size, found["tokens_per_second"], used, room, problem)
        elif peak > limit:
            measured = Measured(size, 0.0, peak, limit, f"needs more than {limit:.1f} GiB")
        elif status < 0 or last_error(log).startswith("Out of memory"):
            measured = Measured(size, problem="out of memory")
        else:
            raise UserError(f"A step with data.batch_size {size} fails: {last_error(log)}")
    say(f"batch size {size:>5}: " + (measured.problem or f"{measured.tokens_per_second:,.0f} tokens per second, "
                                                        f"{measured.memory:.2f} GiB"))
    return measured


def _watched(arguments: list[str], log: Path, limit: float) -> tuple[int, float]:
    """Exit status of a command, and the most GiB that it and its children held; beyond `limit` it is killed."""
    most = 0.0
    with started(arguments, log) as process:
        while process.poll() is None:
            most = max(most, _held(process.pid))
            if most > limit:
                _kill(process.pid)
            time.sleep(0.05)
    return process.returncode, most


def _family(pid: int) -> list[psutil.Process]:
    """A process and its children."""
    try:
        return [process := psutil.Process(pid), *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def _held(pid: int) -> float:
    """GiB that a process and its children hold."""
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
    """GiB of this machine, or of its container, that are free."""
    free = psutil.virtual_memory().available
    with suppress(OSError, ValueError):  # no such limit
        free = min(free, int(CGROUP.read_text()) - int((CGROUP.parent / "memory.current").read_text()))
    return free / GIB
