"""Which share of this machine's matrix products a training step reaches, and where the rest goes.

    python benchmarks/bench.py --roofline                     every task, either engine: about ten minutes on 2 cores
    python benchmarks/roofline.py --only clm-gpt2 sft         those whose names begin so
    python benchmarks/roofline.py --only sft-1b               1.1 billion parameters; needs 8 GB of memory, 5 of disk

The ceiling is measured: the matrix products of a step, at their own shapes and nothing else, by the fastest library of
this precision (MKL, oneDNN or XLA for float32, oneDNN for bfloat16). A step's share of it is the arithmetic that its
real tokens need, per CPU-second, over that:

    tokens x (4 B + 2 B trained)  +  scored tokens x (4 H + 2 H trained)  +  12 L D x pairs x (1/2 if causal)

B are the parameters of the layers with their adapters, H those of the output head, which only scored (labelled) tokens
need; 4 of the 6 FLOP of a trained weight are needed for a frozen one. L layers attend with D features, over the pairs
of positions of each row. Looking up embeddings, norms and activations count nothing, nor does padding.

Where the time goes is from a profile of further steps: torch's profiler, or the trace that XLA writes of its
operations, each of which is traced back to the code that it came from. README.md has the last table.
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

from work import Work

WORKERS, ROOT = Path(__file__).parent / "workers", Path(__file__).parent.parent
PARTS = ("products", "dequantisation", "attention", "head and loss", "norms, activations and the rest", "optimiser",
         "data", "Python and other")
COVERED = 0.9  # of the FLOP of a step's products: the ceiling is measured at the shapes of these
MOST_SHAPES = 12


@dataclass(frozen=True)
class Case:
    """A step to hold against its ceiling.

    Args:
        warm_up: Steps before it is measured, on torch; the JAX engine compiles each length of row in an epoch of them.
        steps: Measured steps.
        target: Least share of the ceiling, where there is one, by run (a key of RUNS).
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
USUAL = [name for name in CASES if name != "sft-1b"]


def flops(report: dict[str, Any], sizes: dict[str, Any], causal: bool) -> float:
    """FLOP that the measured steps need; see the head of this file."""
    body, head = (4 * sizes[part] + 2 * sizes[f"{part}_trained"] for part in ("body", "head"))
    pairs = report["pairs"] / (2 if causal else 1)
    return report["tokens"] * body + report["scored"] * head + 12 * sizes["layers"] * sizes["features"] * pairs


def worker(program: str, asked: dict[str, Any]) -> str:
    """Run a worker to its end and return what it prints.

    Raises:
        SystemExit: It failed; what it said is shown.
    """
    done = subprocess.run(
        [sys.executable, str(WORKERS / program), json.dumps({**asked, "root": str(ROOT)})], cwd=ROOT, text=True,
        capture_output=True, env={**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false",
                                  "PYTHONPATH": str(ROOT), "LMMODS_CACHE": f"{asked['folder']}/cache",
                                  "OMP_WAIT_POLICY": "PASSIVE"})  # else waiting threads burn CPU seconds
    if done.returncode:
        raise SystemExit(f"{program} {asked} failed:\n{done.stdout[-1000:]}\n{done.stderr[-4000:]}")
    return done.stdout


def most_of(products: dict[str, int]) -> dict[str, int]:
    """The shapes that make up most of the FLOP, with their number."""
    def size(shape: str) -> int:
        rows, inner, columns = map(int, shape.split())
        return rows * inner * columns * products[shape]

    kept, covered, total = {}, 0, sum(map(size, products))
    for shape in sorted(products, key=size, reverse=True)[:MOST_SHAPES]:
        if covered < COVERED * total:
            kept[shape], covered = products[shape], covered + size(shape)
    return kept


def measure(name: str, folder: Path) -> list[str]:
    """The rows of one case."""
    case, lines, sizes, ceiling = CASES[name], [], {}, {}
    case.work.write(folder)
    for run in case.runs:
        engine, precision = RUNS[run]
        warm_up = EPOCH if engine == "jax" and case.work.task in ("sft", "qa") else case.warm_up
        worker("profiled.py", {"folder": str(folder), "engine": engine, "warm_up": warm_up, "steps": case.steps,
                               "traced": case.steps, "options": ["--trainer.precision", precision]})
        report = json.loads((folder / f"{engine}.json").read_text())
        if engine == "torch":  # the products of a step are much the same in JAX
            sizes = report
            shapes = most_of(report["products"])
            ceiling = json.loads(worker("products.py", {"folder": str(folder), "products": shapes}))
        lines.append(row(f"{name} | {run}", report, sizes, ceiling, case, run))
        print(lines[-1], flush=True)
    return lines


def row(title: str, report: dict[str, Any], sizes: dict[str, Any], ceiling: dict[str, float], case: Case, run: str
        ) -> str:
    """One line of the table: the step's share of the ceiling, and that of each part in its time."""
    rate = flops(report, sizes, case.work.task in ("sft", "clm")) / report["cpu"]
    kind = "bfloat16" if report.get("bfloat16") else "float32"
    best = max(speed for library, speed in ceiling.items() if library.startswith(kind))
    target = f"{case.target[run]:.0%}" if run in case.target else ""
    seen = sum(report["parts"].values()) / 1e6
    # Operations of XLA may overlap, so that together they take longer than the steps.
    whole = max(seen, report["traced"])
    report["parts"]["Python and other"] = report["parts"].get("Python and other", 0) + 1e6 * (whole - seen)
    shares = [f"{report['parts'].get(part, 0) / 1e6 / whole:.0%}" for part in PARTS]
    return (f"| {title} | {report['tokens'] / report['cpu']:,.0f} | {rate / 1e9:,.0f} | {best / 1e9:,.0f} | "
            f"**{rate / best:.0%}** | {target} | {' | '.join(shares)} |")


def table(names: list[str]) -> str:
    """Measure these cases: a table in Markdown."""
    header = ["step", "run", "tokens per CPU-second", "GFLOP per CPU-second", "ceiling", "share", "target", *PARTS]
    lines = [f"| {' | '.join(header)} |", f"|---|---|{'---:|' * (len(header) - 2)}"]
    with tempfile.TemporaryDirectory() as temporary:
        for name in names:
            lines += measure(name, Path(temporary) / name)
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=USUAL, help="beginnings of names: " + ", ".join(CASES))
    wanted = tuple(parser.parse_args().only)
    print(table([name for name in CASES if name.startswith(wanted)]))


if __name__ == "__main__":
    main()
