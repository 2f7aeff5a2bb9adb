"""How long a command takes to start: answers of the parser, first steps against bare imports, cache hits.

    python benchmarks/startup.py
    python benchmarks/startup.py --rounds 9

Everything is measured in turn, and a figure is the median over the rounds. A run counts from the start of its process
to the row of its first step in metrics.csv, on the demo recipe, with the data and compiled programs in the cache; it is
compared with a script that imports the same libraries and ends. The ratios are of CPU seconds, with one OpenMP thread,
because other work on the machine disturbs wall times; those are in the note, with the first start of all, whose caches
are empty. README.md beside this file has the last figures.
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
# A script of the same libraries, and the most that a run may take to its first step by what it takes.
SCRIPTS = {
    "torch": ("import bitsandbytes, datasets, lightning.pytorch, peft; "
              "from transformers import AutoModelForCausalLM, AutoTokenizer", 1.3),
    "jax": ("import datasets, flax.nnx, jax, lightning.pytorch, optax; from transformers import AutoTokenizer", 1.5),
}
RECIPE = ["--config", "configs/sft_qlora.yaml"]
# What the parser answers, and with which status; each within PARSER_SECONDS of CPU.
ANSWERS = {
    "--help": ([], 0), "fit --help": ([], 0), "inspect --help --engine jax": ([], 0), "merge --help": ([], 0),
    "fit --model.help SFT": ([], 0), "fit … --trainer.max_stepz 3": (RECIPE, 2),
    "fit … --trainer.max_steps many": (RECIPE, 2), "fit … --model.class_path SFTT": (RECIPE, 2),
    "fit … --data.batch_size 0": (RECIPE, 2),
}
NUM_ROWS, HIT_SECONDS = 50_000, 1.0
HITS = {"rows": {}, "packing": {"packing": True}, "group_by_length": {"group_by_length": True}}


@dataclass
class Taken:
    """Seconds of one process."""

    cpu: float
    wall: float


def run(arguments: list[str], folder: Path, until: Path | None = None, expected: int = 0) -> Taken:
    """Start Python and time it to its end, or till the file `until` holds a loss, when it is killed.

    Raises:
        SystemExit: It ended with another status than `expected`, or before that.
    """
    environment = {**os.environ, "LMMODS_CACHE": str(folder / "cache"), "OMP_NUM_THREADS": "1",
                   "WANDB_MODE": "offline"}
    with open(folder / "output.txt", "w") as output:
        start = time.perf_counter()
        process = subprocess.Popen([sys.executable, *arguments], cwd=ROOT, env=environment, stdout=output,
                                   stderr=subprocess.STDOUT)
        ended = 0
        while not ended and not (until and has_loss(until)):
            ended, status, usage = os.wait4(process.pid, os.WNOHANG)
            time.sleep(0.01)
        wall = time.perf_counter() - start
        if not ended:
            process.kill()
            _, status, usage = os.wait4(process.pid, 0)
    if ended and (until or os.waitstatus_to_exitcode(status) != expected):
        raise SystemExit(f"{' '.join(arguments)}\n{(folder / 'output.txt').read_text()}")
    process.returncode = status
    return Taken(usage.ru_utime + usage.ru_stime, wall)


def has_loss(path: Path) -> bool:
    """Whether metrics.csv holds a training step."""
    if not path.exists():
        return False
    header, *rows = (line.split(",") for line in path.read_text().splitlines())
    return "train/loss" in header and any(row[header.index("train/loss")] for row in rows)


def first_step(engine: str, folder: Path) -> Taken:
    """The demo recipe from the start of its process to its first step."""
    out = folder / engine
    shutil.rmtree(out, ignore_errors=True)
    return run(["train.py", "fit", "--config", "configs/sft_qlora.yaml", "--config", "configs/smoke.yaml",
                "--engine", engine, "--trainer.default_root_dir", str(out)], folder, out / "metrics.csv")


def answer(words: str, folder: Path) -> Taken:
    """One of ANSWERS."""
    recipe, status = ANSWERS[words]
    command, *options = words.replace("… ", "").split()
    return run(["train.py", command, *recipe, *options], folder, expected=status)


def measure_commands(rounds: int) -> list[Row]:
    """Answers of the parser, and first steps against bare imports."""
    tasks: dict[str, Callable[[Path], Taken]] = {f"train.py {words}": partial(answer, words) for words in ANSWERS}
    for engine, (script, _) in SCRIPTS.items():
        tasks[f"bare {engine}"] = partial(run, ["-c", script])
        tasks[f"first step {engine}"] = partial(first_step, engine)
    taken: dict[str, list[Taken]] = {name: [] for name in tasks}
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as temporary:  # killed runs may leave a late writer
        for _ in range(rounds + 1):
            for name, task in tasks.items():
                taken[name].append(task(Path(temporary)))
    # The first round fills the caches.
    cpu, wall = ({name: statistics.median(getattr(each, kind) for each in of_task[1:])
                  for name, of_task in taken.items()} for kind in ("cpu", "wall"))
    rows = [Row(f"train.py {words}", "1 s of CPU", cpu[f"train.py {words}"], f"<= {PARSER_SECONDS}",
                f"wall {wall[f'train.py {words}']:.2f} s") for words in ANSWERS]
    for engine, (_, target) in SCRIPTS.items():
        ours, bare, cold = f"first step {engine}", f"bare {engine}", taken[f"first step {engine}"][0]
        rows.append(Row(f"QLoRA demo to its first step, {engine}", "importing the same libraries",
                        cpu[ours] / cpu[bare], f"<= {target}",
                        f"{cpu[ours]:.2f} s against {cpu[bare]:.2f} s of CPU; wall {wall[ours]:.2f} s against "
                        f"{wall[bare]:.2f} s; with empty caches {cold.cpu:.1f} s of CPU, wall {cold.wall:.1f} s"))
    return rows


def measure_hits(rounds: int) -> list[Row]:
    """From `setup("fit")` to the first training batch, with the rows in the cache."""
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
        taken = [[hit(options) for options in HITS.values()] for _ in range(rounds)]
    middle = [statistics.median(of_options) for of_options in zip(*taken, strict=True)]
    return [Row(f"cache hit of {NUM_ROWS:,} rows to the first batch, {name}", f"{HIT_SECONDS:.0f} s",
                seconds / HIT_SECONDS, "<= 1", f"{seconds:.2f} s") for name, seconds in zip(HITS, middle, strict=True)]


def measure(rounds: int) -> list[Row]:
    """All figures."""
    return [*measure_commands(rounds), *measure_hits(rounds)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    print(markdown(measure(parser.parse_args().rounds)))


if __name__ == "__main__":
    main()
