"""Budgets of programs for accelerators that are not here: `plan` of Llama's sizes on H100s, against limits.

    make accelerators       # makes .plan-cuda (3 GB) and runs all; five minutes on two cores

Each row is a plan of its own program, compiled by the device's compiler. It fails where the memory of a device or the
bytes of a kind of collective are more than the limit, or where a line is not compiled but simulated.
"""

import json
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import yaml

ROOT = Path(__file__).parents[1]
ROPE = {"rope_type": "default", "rope_theta": 500000.0}
COMMON = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 128256,
          "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 8192,
          "rope_parameters": ROPE, "bos_token_id": 1, "eos_token_id": 2}
MODELS = {
    "1b": COMMON | {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "head_dim": 64,
                    "tie_word_embeddings": True},
    "8b": COMMON | {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
                    "tie_word_embeddings": False},
}
ADAPTER = {"lora": {"rank": 16, "alpha": 32, "dropout": 0.0}, "quantize": "nf4"}


class Budget(NamedTuple):
    """A plan and the most that it may need.

    Args:
        fields: Of the model, beside its sizes.
        memory: GiB of a device.
        traffic: GiB of each kind of collective in a step.
    """

    model: str
    on: str
    strategy: str
    fields: dict[str, Any]
    memory: float
    traffic: dict[str, float]


BUDGETS = (
    Budget("1b", "8xH100", "ddp", {}, 20.0, {"all-reduce": 4.7}),
    Budget("8b", "8xH100", "fsdp", {}, 17.0, {"all-gather": 26.5, "reduce-scatter": 13.3, "all-to-all": 0.65,
                                              "all-reduce": 0.01}),
    Budget("8b", "8xH100", "fsdp", ADAPTER, 2.0, {"all-gather": 7.0, "reduce-scatter": 0.2, "all-to-all": 0.3,
                                                  "all-reduce": 0.01}),
)


def main() -> int:
    failed = 0
    print(f"{'model':<6}{'on':<9}{'strategy':<10}{'form':<7}{'memory':>10}  collectives")
    for budget in BUDGETS:
        found = plan(budget)
        problems = [f"{name} is {size:.2f} GiB, more than {limit} GiB" for name, limit in (
            ("memory", budget.memory), *budget.traffic.items()) if (size := found.get(name, 0.0)) > limit]
        problems += [f"{name} is not among the budget" for name in found.keys() - budget.traffic.keys() - {"memory"}
                     if found[name] > 0.1]
        traffic = ", ".join(f"{name} {size:.2f}" for name, size in found.items() if name != "memory")
        print(f"{budget.model:<6}{budget.on:<9}{budget.strategy:<10}{budget.fields.get('quantize', 'full'):<7}"
              f"{found['memory']:>6.2f} GiB  {traffic}", *problems, sep="\n    " if problems else "", flush=True)
        failed += bool(problems)
    return failed


def plan(budget: Budget) -> dict[str, float]:
    """GiB of memory and of each kind of collective."""
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        shutil.copytree(ROOT / "demo" / "llama", model, ignore=shutil.ignore_patterns("*.safetensors"))
        (model / "config.json").write_text(json.dumps(MODELS[budget.model]))
        start = {"pretrained": str(model)} if "lora" in budget.fields else {"config": str(model)}
        recipe = {
            "engine": "jax", "trainer": {"max_steps": 100, "precision": "bf16-mixed", "strategy": budget.strategy,
                                         "default_root_dir": f"{folder}/run"},
            "model": {"class_path": "CLM", "init_args": start | {"gradient_checkpointing": True} | budget.fields},
            "data": {"class_path": "CLMData", "init_args": {
                "tokenizer": str(ROOT / "demo" / "llama"), "source": str(ROOT / "demo" / "corpus" / "val.txt"),
                "documents": "paragraph", "max_length": 2048, "batch_size": 1}}}
        file = Path(folder) / "recipe.yaml"
        file.write_text(yaml.safe_dump(recipe))
        done = subprocess.run([sys.executable, "train.py", "plan", "--config", str(file), "--on", budget.on],
                              cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stderr[-3000:])
    lines = {line[:26].strip(): line[26:] for line in done.stdout.splitlines()}
    if not lines["memory of each device"].startswith("compiled"):
        raise SystemExit(f"{budget.on} is not compiled: make plan-cuda.")
    found = {"memory": _gibibytes(lines["memory of each device"])}
    return found | {name: _gibibytes(line) for name, line in lines.items() if re.search(r"\d a step, .* among", line)}


def _gibibytes(line: str) -> float:
    size, unit = re.search(r"([\d,.]+) ([GM])iB", line).groups()
    return float(size.replace(",", "")) / (1 if unit == "G" else 1024)


if __name__ == "__main__":
    sys.exit(main())
