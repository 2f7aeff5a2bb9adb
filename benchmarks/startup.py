"""Measure how long a command takes to start: parser responses, first steps, cache hits.

    python benchmarks/startup.py
    python benchmarks/startup.py --rounds 9

All measurements take turns, and each figure is the median over the rounds. A run is timed on the demo recipe, from the
start of its process to the row of its first step in metrics.csv, with data and compiled programs in the cache. It is
compared with a script that only imports the same libraries. Ratios compare CPU seconds with one OpenMP thread, because
other work on the machine disturbs wall times. The note has wall times and the very first start, with empty caches.
README.md in this folder has the last figures.
"""

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from data import write_instructions
from table import Row, markdown

ROOT = Path(__file__).parent.parent
PARSER_SECONDS = 1.5
# Script that imports the same libraries, and the maximum ratio of the time to a run's first step to its time.
SCRIPTS = {
    "torch": ("import bitsandbytes, datasets, lightning.pytorch, peft; "
              "from transformers import AutoModelForCausalLM, AutoTokenizer", 1.3),
    "jax": ("import datasets, flax.nnx, jax, lightning.pytorch, optax; from transformers import AutoTokenizer", 1.5),
}
RECIPE = ["--config", "configs/sft_qlora.yaml"]
# Command lines that the parser answers within PARSER_SECONDS of CPU: further options and exit status.
ANSWERS = {
    "--help": ([], 0), "fit --help": ([], 0), "inspect --help --engine jax": ([], 0), "merge --help": ([], 0),
    "fit --model.help SFT": ([], 0), "fit … --trainer.max_stepz 3": (RECIPE, 2),
    "fit … --trainer.max_steps many": (RECIPE, 2), "fit … --model.class_path SFTT": (RECIPE, 2),
    "fit … --data.batch_size 0": (RECIPE, 2),
}
NUM_ROWS, HIT_SECONDS = 50_000, 1.0
HITS = {"rows": {}, "packing": {"packing": True}, "group_by_length": {"group_by_length": True}}


@dataclass
class Duration:
    """CPU and wall seconds of a process."""

    cpu: float
    wall: float


def time_process(arguments: list[str], folder: Path, until: Path | None = None, expected_status: int = 0) -> Duration:
    """Start Python and time it until it exits, or until the file `until` contains a loss, when it is killed.

    Raises:
        SystemExit: It exited with another status than `expected_status`, or before the loss.
    """
    environment = {**os.environ, "LMMODS_CACHE": str(folder / "cache"), "OMP_NUM_THREADS": "1",
                   "WANDB_MODE": "offline"}
    with open(folder / "output.txt", "w") as output:
        start = time.perf_counter()
        process = subprocess.Popen([sys.executable, *arguments], cwd=ROOT, env=environment, stdout=output,
                                   stderr=subprocess.STDOUT)
        exited_pid = 0
        while not exited_pid and not (until and has_loss(until)):
            exited_pid, status, usage = os.wait4(process.pid, os.WNOHANG)
            time.sleep(0.01)
        wall = time.perf_counter() - start
        if not exited_pid:
            process.kill()
            _, status, usage = os.wait4(process.pid, 0)
    if exited_pid and (until or os.waitstatus_to_exitcode(status) != expected_status):
        raise SystemExit(f"{' '.join(arguments)}\n{(folder / 'output.txt').read_text()}")
    process.returncode = status
    return Duration(usage.ru_utime + usage.ru_stime, wall)


def has_loss(path: Path) -> bool:
    """True if metrics.csv contains a training step."""
    if not path.exists():
        return False
    header, *rows = (line.split(",") for line in path.read_text().splitlines())
    return "train/loss" in header and any(row[header.index("train/loss")] for row in rows)


def time_first_step(engine: str, folder: Path) -> Duration:
    """Time the demo recipe from the start of its process to its first step."""
    out = folder / engine
    shutil.rmtree(out, ignore_errors=True)
    return time_process(["train.py", "fit", "--config", "configs/sft_qlora.yaml", "--config", "configs/smoke.yaml",
                         "--engine", engine, "--trainer.default_root_dir", str(out)], folder, out / "metrics.csv")


def time_answer(words: str, folder: Path) -> Duration:
    """Time one of ANSWERS."""
    recipe, status = ANSWERS[words]
    command, *options = words.replace("… ", "").split()
    return time_process(["train.py", command, *recipe, *options], folder, expected_status=status)


def measure_commands(rounds: int) -> list[Row]:
    """Measure parser responses, and first steps compared with bare imports."""
    tasks: dict[str, Callable[[Path], Duration]] = {
        f"train.py {words}": partial(time_answer, words) for words in ANSWERS}
    for engine, (script, _) in SCRIPTS.items():
        tasks[f"bare {engine}"] = partial(time_process, ["-c", script])
        tasks[f"first step {engine}"] = partial(time_first_step, engine)
    durations: dict[str, list[Duration]] = {name: [] for name in tasks}
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as temporary:  # killed runs may still be writing
        for _ in range(rounds + 1):
            for name, task in tasks.items():
                durations[name].append(task(Path(temporary)))
    # Without the first round, which fills the caches.
    cpu, wall = ({name: statistics.median(getattr(duration, clock) for duration in task_durations[1:])
                  for name, task_durations in durations.items()} for clock in ("cpu", "wall"))
    rows = [Row(f"train.py {words}", "1 s of CPU", cpu[f"train.py {words}"], f"<= {PARSER_SECONDS}",
                f"wall {wall[f'train.py {words}']:.2f} s") for words in ANSWERS]
    for engine, (_, target) in SCRIPTS.items():
        first, bare, cold = f"first step {engine}", f"bare {engine}", durations[f"first step {engine}"][0]
        rows.append(Row(f"QLoRA demo to its first step, {engine}", "importing the same libraries",
                        cpu[first] / cpu[bare], f"<= {target}",
                        f"{cpu[first]:.2f} s against {cpu[bare]:.2f} s of CPU; wall {wall[first]:.2f} s against "
                        f"{wall[bare]:.2f} s; with empty caches {cold.cpu:.1f} s of CPU, wall {cold.wall:.1f} s"))
    return rows


def measure_hits(rounds: int) -> list[Row]:
    """Measure the time from `setup("fit")` to the first training batch, with the rows in the cache."""
    from lmmods.data.sft import SFTData

    def hit(options: dict[str, bool]) -> float:
        data = SFTData(str(path), tokenizer=str(ROOT / "demo" / "llama"), template="alpaca", max_length=512,
                       batch_size=4, cache_dir=str(path.parent / "cache"), **options)
        start = time.perf_counter()
        data.setup("fit")
        next(iter(data.train_batches()))
        return time.perf_counter() - start

    with tempfile.TemporaryDirectory() as temporary:
        path = Path(temporary) / "rows.jsonl"
        write_instructions(path, NUM_ROWS)
        hit({})
        seconds_by_round = [[hit(options) for options in HITS.values()] for _ in range(rounds)]
    medians = [statistics.median(option_seconds) for option_seconds in zip(*seconds_by_round, strict=True)]
    return [Row(f"cache hit of {NUM_ROWS:,} rows to the first batch, {name}", f"{HIT_SECONDS:.0f} s",
                seconds / HIT_SECONDS, "<= 1", f"{seconds:.2f} s") for name, seconds in zip(HITS, medians, strict=True)]


def measure(rounds: int) -> list[Row]:
    """Measure everything."""
    return [*measure_commands(rounds), *measure_hits(rounds)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    print(markdown(measure(parser.parse_args().rounds)))


if __name__ == "__main__":
    main()
