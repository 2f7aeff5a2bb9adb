"""Measure how the cost of a token grows with the model, and the cost of a start with the data: `make bench-scale`.

    python benchmarks/scale.py --out FOLDER            about 20 minutes on 2 cores; plots each axis in FOLDER
    python benchmarks/scale.py --quick                 3 minutes: torch only, the small end of each axis
    python benchmarks/scale.py --only width rows

Models are Llamas with random weights (2 layers of width 256, 8,000 words, rows of 512 tokens) in full float32 training,
with one of these sizes varied. `per FLOP` is the time of a token divided by its arithmetic, relative to the first model
of the axis. 1 means that time grows like the arithmetic; less means better use of the machine, as with wide matrices.
Rows are in the cache; a start is measured from opening the cache to the first batch and the report.
"""

import argparse
import json
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from roofline import ROOT, flops, run_worker
from work import write_text

TOKENS = 4096  # per step; a step has at least one row
BASE = {"width": 256, "depth": 2, "length": 512, "vocabulary": 8_000}
TOKENIZER = str(ROOT / "demo" / "llama")
AXES = {"width": (128, 256, 512, 1024, 2048), "depth": (2, 4, 8, 16, 32), "length": (128, 512, 2048, 8192),
        "vocabulary": (8_000, 32_000, 128_000, 256_000)}
ROWS = (10**3, 10**4, 10**5, 10**6, 10**7)
START = {"rows": {}, "packing": {"packing": True}, "group_by_length": {"group_by_length": True}}
QUICK = 2  # number of sizes per axis with --quick


@dataclass(frozen=True)
class Point:
    """Point of a curve: `x` on its axis, `y` in microseconds or seconds, and a note for the table."""

    curve: str
    x: int
    y: float
    note: str


def measure_step(axis: str, sizes: tuple[int, ...], engines: tuple[str, ...], folder: Path) -> list[Point]:
    """Measure the CPU-microseconds per token along one axis."""
    points = []
    token_flops: dict[int, float] = {}  # FLOP per token by size, counted by torch's process for both engines
    for engine in engines:
        first_cost = None
        for size in sizes:
            write_recipe(folder, {**BASE, axis: size})
            run_worker("profiled.py", {"folder": str(folder), "engine": engine, "warm_up": 2, "steps": 3, "traced": 0,
                                       "options": ["--trainer.precision", "32-true"]})
            report = json.loads((folder / f"{engine}.json").read_text())
            if engine == "torch":
                token_flops[size] = flops(report, report, causal=True) / report["tokens"]
            microseconds = 1e6 * report["cpu"] / report["tokens"]
            first_cost = first_cost or microseconds / token_flops[size]
            points.append(Point(engine, size, microseconds, f"{token_flops[size] / 1e6:,.0f} MFLOP; per FLOP "
                                f"{microseconds / token_flops[size] / first_cost:.2f}"))
            print(f"| {axis} {size:,} | {engine} | {microseconds:,.1f} us | {points[-1].note} |", flush=True)
    return points


def write_recipe(folder: Path, sizes: dict[str, int]) -> None:
    """Write recipe.yaml for a model of these sizes."""
    width, length = sizes["width"], sizes["length"]
    config = {"model_type": "llama", "hidden_size": width, "num_hidden_layers": sizes["depth"],
              "num_attention_heads": width // 64, "intermediate_size": 11 * width // 4 // 16 * 16,
              "vocab_size": sizes["vocabulary"], "max_position_embeddings": 8192}
    recipe: dict[str, Any] = {
        "seed_everything": 1,
        "trainer": {"max_steps": 1000, "accelerator": "cpu", "devices": 1, "num_sanity_val_steps": 0,
                    "enable_checkpointing": False, "enable_progress_bar": False},
        "model": {"class_path": "CLM", "init_args": {"config": config, "optimizer": {"lr": 1e-4}}},
        "data": {"class_path": "CLMData", "init_args": {
            "source": str(folder / "corpus.txt"), "documents": "line", "tokenizer": TOKENIZER, "max_length": length,
            "batch_size": max(TOKENS // length, 1), "cache_dir": str(folder / "cache")}}}
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))


def measure_starts(sizes: tuple[int, ...], folder: Path) -> list[Point]:
    """Measure the CPU-seconds of a start on these numbers of rows in the cache."""
    points = []
    for size in sizes:
        for name, options in START.items():
            settings = {"folder": str(folder), "rows": size, "options": options, "tokenizer": TOKENIZER}
            if name == "rows":
                run_worker("cached.py", settings)  # writes the cache
            usage = json.loads(run_worker("cached.py", settings))
            points.append(Point(name, size, usage["cpu"], f"wall {usage['wall']:.2f} s; {usage['megabytes']:,.0f} MB"))
            print(f"| start on {size:,} rows | {name} | {usage['cpu']:.2f} s | {points[-1].note} |", flush=True)
    return points


def plot_axis(axis: str, unit: str, points: list[Point], path: Path) -> None:
    """Plot the curves of an axis on logarithmic scales."""
    from matplotlib.figure import Figure

    axes = (figure := Figure(figsize=(5, 3.5), layout="constrained")).subplots()
    for curve in dict.fromkeys(point.curve for point in points):
        curve_points = [point for point in points if point.curve == curve]
        axes.loglog([point.x for point in curve_points], [point.y for point in curve_points], marker="o", label=curve)
    axes.set_xlabel(axis)
    axes.set_ylabel(unit)
    axes.grid(visible=True, which="both", alpha=0.3)
    axes.legend()
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", choices=[*AXES, "rows"], default=[*AXES, "rows"])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--out", type=Path, help="folder for the plots")
    args = parser.parse_args()
    engines = ("torch",) if args.quick else ("torch", "jax")
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        write_text(folder / "corpus.txt", tokens=100_000)
        print("| size | curve | time | note |\n|---|---|---:|---|")
        for axis in args.only:
            sizes = AXES.get(axis, ROWS)[:QUICK if args.quick else None]
            points = measure_starts(sizes, folder) if axis == "rows" else measure_step(axis, sizes, engines, folder)
            if args.out:
                args.out.mkdir(parents=True, exist_ok=True)
                plot_axis(axis, "CPU-seconds" if axis == "rows" else "CPU-microseconds per token", points,
                          args.out / f"{axis}.svg")


if __name__ == "__main__":
    main()
