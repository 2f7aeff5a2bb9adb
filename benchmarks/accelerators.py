"""Plan Llamas on accelerators that this machine does not have, and compare memory and traffic with budgets.

    make accelerators       # creates .plan-cuda (3 GB) and .plan-tpu (0.7 GB); a quarter of an hour

Each row plans its own program, compiled by the device's compiler. A row fails if the memory of a device or the bytes of
a kind of collective exceed the budget. The command stops if a program is simulated instead of compiled.
"""

import re
import sys
import tempfile
from itertools import product
from pathlib import Path
from typing import NamedTuple

from plans import DEMO, parse_gibibytes, run_plan, write_model_folder

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


STRATEGIES = {"ddp": "ddp", "fsdp": "fsdp",
              "mesh": {"class_path": "MeshSharding", "init_args": {"fsdp": 4, "tensor": 2}}}
COLLECTIVES = ("all-gather", "reduce-scatter", "all-to-all", "all-reduce", "collective-permute")
TOLERANCE = 1.03  # a new release of XLA may move a buffer; gathering one more matrix exceeds this


class Case(NamedTuple):
    """Recipe and devices of a plan.

    Args:
        form: `full` or `nf4`.
        rows: `padded` or `packed`.
    """

    model: str
    on: str
    strategy: str
    form: str
    rows: str


# GiB of memory per device, then GiB per step of each of COLLECTIVES. On GPUs, attention is cuDNN's fused kernel.
BUDGETS: dict[Case, tuple[float, ...]] = {
    Case("1b", "8xH100", "ddp", "full", "padded"): (18.97, 0.0, 0.0, 0.0, 4.6, 0.0),
    Case("1b", "8xH100", "ddp", "full", "packed"): (18.98, 0.0, 0.0, 0.0, 4.6, 0.0),
    Case("1b", "8xH100", "ddp", "nf4", "padded"): (1.75, 0.0, 0.0, 0.0, 0.04, 0.0),
    Case("1b", "8xH100", "ddp", "nf4", "packed"): (1.75, 0.0, 0.0, 0.0, 0.04, 0.0),
    Case("1b", "8xH100", "fsdp", "full", "padded"): (2.95, 3.77, 1.84, 0.31, 0.0, 0.0),
    Case("1b", "8xH100", "fsdp", "full", "packed"): (2.95, 3.77, 1.84, 0.31, 0.0, 0.0),
    Case("1b", "8xH100", "fsdp", "nf4", "padded"): (0.57, 0.99, 0.05, 0.14, 0.0, 0.0),
    Case("1b", "8xH100", "fsdp", "nf4", "packed"): (0.58, 0.99, 0.05, 0.14, 0.0, 0.0),
    Case("1b", "8xH100", "mesh", "full", "padded"): (2.8, 1.9, 0.92, 0.28, 0.88, 0.0),
    Case("1b", "8xH100", "mesh", "full", "packed"): (2.8, 1.9, 0.92, 0.28, 0.88, 0.0),
    Case("1b", "8xH100", "mesh", "nf4", "padded"): (0.45, 0.51, 0.03, 0.13, 1.01, 0.0),
    Case("1b", "8xH100", "mesh", "nf4", "packed"): (0.45, 0.51, 0.03, 0.13, 1.01, 0.0),
    Case("8b", "8xH100", "ddp", "nf4", "padded"): (6.97, 0.0, 0.0, 0.0, 0.16, 0.0),
    Case("8b", "8xH100", "ddp", "nf4", "packed"): (6.97, 0.0, 0.0, 0.0, 0.16, 0.0),
    Case("8b", "8xH100", "fsdp", "full", "padded"): (16.51, 26.28, 13.06, 0.61, 0.0, 0.0),
    Case("8b", "8xH100", "fsdp", "full", "packed"): (16.52, 26.28, 13.06, 0.61, 0.0, 0.0),
    Case("8b", "8xH100", "fsdp", "nf4", "padded"): (1.8, 6.89, 0.14, 0.28, 0.0, 0.0),
    Case("8b", "8xH100", "fsdp", "nf4", "packed"): (1.81, 6.89, 0.14, 0.28, 0.0, 0.0),
    Case("8b", "8xH100", "mesh", "full", "padded"): (16.21, 13.17, 6.53, 0.55, 3.51, 0.0),
    Case("8b", "8xH100", "mesh", "full", "packed"): (16.22, 13.17, 6.53, 0.55, 3.51, 0.0),
    Case("8b", "8xH100", "mesh", "nf4", "padded"): (1.7, 3.49, 0.08, 0.26, 4.03, 0.0),
    Case("8b", "8xH100", "mesh", "nf4", "packed"): (1.71, 3.49, 0.08, 0.26, 4.03, 0.0),
    Case("1b", "v5e-16", "fsdp", "full", "padded"): (2.25, 3.91, 0.0, 0.09, 0.0, 0.59),
}


def main() -> int:
    is_measuring = sys.argv[1:] == ["--measure"]
    cases = [Case(*fields) for fields in product(MODELS, ["8xH100"], STRATEGIES, ["full", "nf4"], ["padded", "packed"])
             if fields[0] != "8b" or fields[2:4] != ("ddp", "full")]  # does not fit on an H100
    cases.append(Case("1b", "v5e-16", "fsdp", "full", "padded"))
    failed = 0
    print(f"{'model':<6}{'on':<8}{'strategy':<10}{'form':<6}{'rows':<8}{'memory':>12}  collectives")
    for case in cases if is_measuring else BUDGETS:
        usage = plan_case(case)
        limits = dict(zip(("memory", *COLLECTIVES), BUDGETS.get(case, ()), strict=False))
        problems = [f"{name} is {usage.get(name, 0.0):.2f} GiB, more than {limit} GiB" for name, limit in
                    limits.items() if usage.get(name, 0.0) > TOLERANCE * limit + 0.02]
        traffic = ", ".join(f"{name} {usage[name]:.2f}" for name in COLLECTIVES if usage.get(name))
        print(f"{case.model:<6}{case.on:<8}{case.strategy:<10}{case.form:<6}{case.rows:<8}{usage['memory']:>8.2f} GiB"
              f"  {traffic}", *problems, sep="\n    " if problems else "", flush=True)
        if is_measuring:
            budget = tuple(round(usage.get(name, 0.0), 2) for name in ("memory", *COLLECTIVES))
            print(f"    {case}: {budget},", flush=True)
        failed += bool(problems)
    return failed


def plan_case(case: Case) -> dict[str, float]:
    """Return the GiB of memory per device and of each kind of collective per step.

    Raises:
        SystemExit: The program is not compiled, or attention is not the fused kernel.
    """
    with tempfile.TemporaryDirectory() as folder:
        model = str(write_model_folder(Path(folder), MODELS[case.model]))
        fields = {"pretrained": model} | ADAPTER if case.form == "nf4" else {"config": model}
        recipe = {
            "engine": "jax",
            "trainer": {"max_steps": 100, "precision": "bf16-mixed", "strategy": STRATEGIES[case.strategy]},
            "model": {"class_path": "CLM", "init_args": {"gradient_checkpointing": True} | fields},
            "data": {"class_path": "CLMData", "init_args": {
                "tokenizer": str(DEMO / "llama"), "source": str(DEMO / "corpus" / "val.txt"),
                "documents": "paragraph", "max_length": 2048, "batch_size": 1, "packing": case.rows == "packed"}}}
        lines = run_plan(recipe, case.on).lines
    if not lines["memory of each device"].startswith("compiled"):
        raise SystemExit(f"The plan for {case.on} is not compiled. Run make plan-cuda plan-tpu.")
    if "H100" in case.on and "fmha" not in lines.get("fused attention", ""):
        raise SystemExit(f"{case}: attention does not use cuDNN's kernel.")
    memory = {"memory": parse_gibibytes(lines["memory of each device"])}
    return memory | {name: parse_gibibytes(line) for name, line in lines.items()
                     if re.search(r"\d a step, .* among", line)}


if __name__ == "__main__":
    sys.exit(main())
