"""One recipe on both engines, in turn: real tokens per second of its steps, CPU seconds and peak memory of the process.

    python benchmarks/engines.py                    QLoRA of a Llama of 100M parameters on generated instructions
    python benchmarks/engines.py --recipe clm --size small
    python benchmarks/engines.py --rounds 5

Both engines train the same random weights on the same batches; the losses of the two are compared as well. A speed is
the median over a run's logged steps, without the first ones, in which programs are compiled. README.md beside this file
has the last figures.
"""

import argparse
import csv
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import yaml
from data import write_instructions

ROOT = Path(__file__).parent.parent
SIZES = {
    "small": {"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 4, "num_attention_heads": 4},
    "100m": {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 12, "num_attention_heads": 12},
}
TASKS = {"qlora": {"quantize": "nf4", "lora": {"rank": 16, "alpha": 32}}, "lora": {"lora": {"rank": 16, "alpha": 32}},
         "full": {}}
WARM_UP = 4  # logged steps that are left out


@dataclass
class Run:
    """What one run of one engine took."""

    losses: list[float]
    speed: float  # real tokens a second
    cpu_seconds: float
    peak: float  # GiB


def write_model(folder: Path, size: str) -> None:
    """A random Llama with the demo's tokenizer and a vocabulary of 32,000."""
    import torch
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "demo" / "llama")
    config = LlamaConfig(**SIZES[size], vocab_size=32_000, tie_word_embeddings=True, max_position_embeddings=1024,
                         bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id,
                         pad_token_id=tokenizer.pad_token_id)
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def recipe(folder: Path, task: str, precision: str, steps: int) -> dict:
    return {
        "seed_everything": 1,
        "trainer": {"max_steps": steps, "accelerator": "cpu", "devices": 1, "precision": precision,
                    "num_sanity_val_steps": 0, "limit_val_batches": 0, "log_every_n_steps": 1,
                    "enable_checkpointing": False, "enable_progress_bar": False},
        "model": {"class_path": "SFT", "init_args": {
            "pretrained": str(folder / "model"), **TASKS[task], "optimizer": {"lr": 1e-4, "schedule": "constant"}}},
        "data": {"class_path": "SFTData", "init_args": {
            "source": str(folder / "rows.jsonl"), "template": "alpaca", "max_length": 512, "batch_size": 4,
            "group_by_length": True, "val_size": 0}},
    }


def run(engine: str, folder: Path, config: Path) -> Run:
    """Train in a process of its own."""
    out = folder / engine
    command = [sys.executable, "train.py", "fit", "--config", str(config), "--engine", engine,
               "--trainer.default_root_dir", str(out), "--overwrite", "true"]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                               env={**os.environ, "LMMODS_CACHE": str(folder / "cache")})
    said = process.stdout.read()
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"{' '.join(command)}\n{said}")
    with open(out / "metrics.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    return Run([float(row["train/loss"]) for row in rows],
               statistics.median(float(row["train/tokens_per_second"]) for row in rows[WARM_UP:]),
               usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 2**20)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", choices=TASKS, default="qlora")
    parser.add_argument("--size", choices=SIZES, default="100m")
    parser.add_argument("--precision", default="32-true")
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    runs: dict[str, list[Run]] = {"torch": [], "jax": []}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        write_model(folder / "model", args.size)
        write_instructions(folder / "rows.jsonl", 600)
        config = folder / "recipe.yaml"
        config.write_text(yaml.safe_dump(recipe(folder, args.recipe, args.precision, args.steps)))
        for number in range(args.rounds):
            for engine, done in runs.items():
                done.append(run(engine, folder, config))
                last = done[-1]
                print(f"round {number + 1} {engine:5}  {last.speed:7.1f} tokens/s  {last.cpu_seconds:6.0f} CPU s  "
                      f"{last.peak:.2f} GiB", flush=True)
    middle = {engine: {field: statistics.median(getattr(each, field) for each in done)
                       for field in ("speed", "cpu_seconds", "peak")} for engine, done in runs.items()}
    apart = max(abs(a - b) for a, b in zip(runs["jax"][0].losses, runs["torch"][0].losses, strict=True))
    print(f"{args.recipe} {args.size} {args.precision}, jax / torch, ratio of medians of {args.rounds} rounds: "
          + ", ".join(f"{field} {middle['jax'][field] / middle['torch'][field]:.2f}" for field in middle["jax"])
          + f"; losses differ by at most {apart:.1e} in {args.steps} steps.")


if __name__ == "__main__":
    main()
