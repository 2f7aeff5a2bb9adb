"""Measure which fraction of this machine's peak a training step reaches, and where its time goes.

    python benchmarks/bench.py --roofline                     all tasks, both engines: about ten minutes on 2 cores
    python benchmarks/roofline.py --only clm-gpt2 sft         cases whose names start with one of these
    python benchmarks/roofline.py --only sft-1b               1.1 billion parameters; needs 8 GB of memory, 5 of disk

The ceiling is measured: the matrix products of a step alone, at their shapes, with the fastest library for the
precision (MKL, oneDNN or XLA for float32, oneDNN for bfloat16). A step's fraction of it is the arithmetic per
CPU-second that its real tokens need, divided by the ceiling. The arithmetic is

    tokens x (4 B + 2 B trained)  +  target tokens x (4 H + 2 H trained)  +  12 L D x pairs x (1/2 if causal)

B are the parameters of the layers with their adapters. H are the parameters of the output head, which only target
(labelled) tokens need. A frozen weight needs 4 of the 6 FLOP of a trained one. L layers attend with D features, over
the pairs of positions of each row. Embeddings, norms, activations and padding count nothing.

The time is profiled in further steps, by torch's profiler or XLA's trace, and divided by workers/step_time.py.
README.md has the last table.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from work import CONFIGS, RANK, Work

WORKERS, ROOT = Path(__file__).parent / "workers", Path(__file__).parent.parent
sys.path.append(str(WORKERS))
from step_time import GROUPS  # noqa: E402

MIN_COVERAGE = 0.9  # minimum fraction of the FLOP of a step's products in the shapes that the ceiling is measured at
MAX_SHAPES = 12


@dataclass(frozen=True)
class Case:
    """Step to compare with its ceiling.

    Args:
        target: Minimum fraction of the ceiling by run (a key of RUNS), if there is one.
        warm_up: Steps before measuring, on torch; the JAX engine warms up for an epoch to compile every row length.
        steps: Measured steps.
        runs: Keys of RUNS.
    """

    work: Work
    target: dict[str, float]
    warm_up: int = 4
    steps: int = 6
    runs: tuple[str, ...] = ("torch, float32", "torch, auto", "jax, float32")


RUNS = {"torch, float32": ("torch", "32-true"), "torch, auto": ("torch", "auto"), "jax, float32": ("jax", "32-true")}
EPOCH = 50  # steps
FLOAT32 = {"torch, float32": 0.6, "jax, float32": 0.6}
CASES = {
    "sft": Case(Work("sft", "llama-b", 512, method="qlora", num_rows=8 * EPOCH), FLOAT32, steps=12),
    "clm-gpt2": Case(Work("clm", "gpt2", 512), FLOAT32),
    "clm-llama": Case(Work("clm", "llama-a", 512), FLOAT32),
    "mlm": Case(Work("mlm", "bert", 512), {}),
    "qa": Case(Work("qa", "bert", 384, num_rows=8 * EPOCH), {}, steps=12),
    "sft-1b": Case(Work("sft", "llama-1b", 512, method="qlora", num_rows=400, dtype="bfloat16"), {"torch, auto": 0.5},
                   2, 3, ("torch, auto",)),
}
DEFAULT_CASES = [name for name in CASES if name != "sft-1b"]


def flops(report: dict[str, Any], sizes: dict[str, Any], causal: bool) -> float:
    """Return the FLOP that the measured steps need; see the docstring of this file."""
    body, head = (4 * sizes[part] + 2 * sizes[f"{part}_trained"] for part in ("body", "head"))
    pairs = report["pairs"] / (2 if causal else 1)
    return report["tokens"] * body + report["scored"] * head + 12 * sizes["layers"] * sizes["features"] * pairs


def run_worker(program: str, settings: dict[str, Any], seconds: float | None = None) -> str:
    """Run a worker and return its output.

    Args:
        seconds: Timeout; None for none.

    Raises:
        SystemExit: The worker failed; the message has the end of its output.
    """
    process = subprocess.run(
        [sys.executable, str(WORKERS / program), json.dumps({**settings, "root": str(ROOT)})], cwd=ROOT, text=True,
        capture_output=True, timeout=seconds,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONPATH": str(ROOT),
             "LMMODS_CACHE": f"{settings['folder']}/cache",
             "OMP_WAIT_POLICY": "PASSIVE"})  # otherwise waiting threads use CPU time
    if process.returncode:
        raise SystemExit(f"{program} {settings} failed:\n{process.stdout[-1000:]}\n{process.stderr[-4000:]}")
    return process.stdout


def select_shapes(products: dict[str, int]) -> dict[str, int]:
    """Return the shapes with most of the FLOP, and their number of products."""
    def size(shape: str) -> int:
        rows, inner, columns = map(int, shape.split())
        return rows * inner * columns * products[shape]

    shapes, covered, total = {}, 0, sum(map(size, products))
    for shape in sorted(products, key=size, reverse=True)[:MAX_SHAPES]:
        if covered < MIN_COVERAGE * total:
            shapes[shape], covered = products[shape], covered + size(shape)
    return shapes


def measure(name: str, folder: Path) -> list[str]:
    """Return the table rows of one case."""
    case, lines, sizes, ceiling = CASES[name], [], {}, {}
    case.work.write(folder)
    for run in case.runs:
        engine, precision = RUNS[run]
        warm_up = EPOCH if engine == "jax" and case.work.task in ("sft", "qa") else case.warm_up
        run_worker("profiled.py", {"folder": str(folder), "engine": engine, "warm_up": warm_up, "steps": case.steps,
                                   "traced": case.steps, "options": ["--trainer.precision", precision],
                                   "vocab_size": CONFIGS[case.work.model]["vocab_size"],
                                   "rank": None if case.work.method == "full" else RANK})
        report = json.loads((folder / f"{engine}.json").read_text())
        if engine == "torch":  # JAX is compared with the same products, which are nearly its own
            sizes = report
            shapes = select_shapes(report["products"])
            ceiling = json.loads(run_worker("products.py", {"folder": str(folder), "products": shapes}))
        lines.append(make_row(f"{name} | {run}", report, sizes, ceiling, case, run))
        print(lines[-1], flush=True)
    return lines


def make_row(title: str, report: dict[str, Any], sizes: dict[str, Any], ceiling: dict[str, float], case: Case, run: str
             ) -> str:
    """Return a table line: the step's fraction of the ceiling, and the fraction of its time by part."""
    rate = flops(report, sizes, case.work.task in ("sft", "clm")) / report["cpu"]
    dtype = "bfloat16" if report.get("bfloat16") else "float32"
    peak = max(speed for library, speed in ceiling.items() if library.startswith(dtype))
    target = f"{case.target[run]:.0%}" if run in case.target else ""
    fractions = [f"{report['parts'][group] / sum(report['parts'].values()):.0%}" for group in GROUPS]
    return (f"| {title} | {report['tokens'] / report['cpu']:,.0f} | {rate / 1e9:,.0f} | {peak / 1e9:,.0f} | "
            f"**{rate / peak:.0%}** | {target} | {' | '.join(fractions)} |")


def make_table(names: list[str]) -> str:
    """Measure cases and return a Markdown table."""
    header = ["step", "run", "tokens per CPU-second", "GFLOP per CPU-second", "ceiling", "fraction", "target", *GROUPS]
    lines = [f"| {' | '.join(header)} |", f"|---|---|{'---:|' * (len(header) - 2)}"]
    with tempfile.TemporaryDirectory() as temporary:
        for name in names:
            lines += measure(name, Path(temporary) / name)
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=DEFAULT_CASES, help="name prefixes: " + ", ".join(CASES))
    prefixes = tuple(parser.parse_args().only)
    print(make_table([name for name in CASES if name.startswith(prefixes)]))


if __name__ == "__main__":
    main()
