"""How long a command takes to start: answers of the parser, first steps against importing Lightning, cache hits.

    python benchmarks/startup.py
    python benchmarks/startup.py --rounds 9

Everything is measured in turn, and a figure is the median over the rounds. A run counts from the start of its process
to the row of its first step in metrics.csv, on the demo recipe, with the data and compiled programs in the cache. The
ratios are of CPU seconds, with one OpenMP thread, because other work on the machine disturbs wall times; those are in
the note. README.md beside this file has the last figures.
"""

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from data import write_instructions
from table import Row, markdown

ROOT = Path(__file__).parent.parent
REFERENCE = "import lightning.pytorch"
PARSER_SECONDS, RUN_TARGET = 1.5, 2.5
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
    """Answers of the parser, and first steps against importing Lightning."""
    tasks = {
        REFERENCE: (0.0, lambda folder: run(["-c", REFERENCE], folder)),
        **{f"train.py {words}": (PARSER_SECONDS, partial(answer, words)) for words in ANSWERS},
        "QLoRA demo to its first step, torch": (RUN_TARGET, lambda folder: first_step("torch", folder)),
        "QLoRA demo to its first step, jax": (RUN_TARGET, lambda folder: first_step("jax", folder)),
    }
    taken: dict[str, list[Taken]] = {name: [] for name in tasks}
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as temporary:  # killed runs may leave a late writer
        folder = Path(temporary)
        for number in range(rounds + 1):
            for name, (_, task) in tasks.items():
                seconds = task(folder)
                if number:  # the first round fills the caches
                    taken[name].append(seconds)
    cpu, wall = ({name: statistics.median(getattr(each, kind) for each in of_task) for name, of_task in taken.items()}
                 for kind in ("cpu", "wall"))
    return [Row(name, "1 s of CPU", cpu[name], f"<= {target}", f"wall {wall[name]:.2f} s")
            if target == PARSER_SECONDS else
            Row(name, REFERENCE, cpu[name] / cpu[REFERENCE], f"<= {target}",
                f"{cpu[name]:.2f} s against {cpu[REFERENCE]:.2f} s of CPU; wall {wall[name]:.2f} s against "
                f"{wall[REFERENCE]:.2f} s")
            for name, (target, _) in tasks.items() if name != REFERENCE]


def measure_hits(rounds: int) -> list[Row]:
    """From `setup("fit")` to the first training batch, with the rows in the cache."""
    from lmmods.data.sft import SFTData

    def hit(options: dict[str, bool]) -> float:
        data = SFTData(str(path), tokenizer=str(ROOT / "demo" / "llama"), template="alpaca", max_length=512,
                       batch_size=4, cache_dir=str(path.parent / "cache"), **options)
        start = time.perf_counter()
        data.setup("fit")
        next(iter(data.train_dataloader()))
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
