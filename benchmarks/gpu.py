"""Both engines on one NVIDIA card, through the real trainers, in less than eight minutes: a Markdown table.

    python benchmarks/gpu.py
    python benchmarks/gpu.py --parts ceiling clm-torch clm-jax
    python benchmarks/gpu.py --smoke             the same program at toy sizes on the CPU; its figures mean nothing

Recipe fields. Causal LM: Llama-3.2-1B's shape with random weights, rows of 4096 tokens, batch_size 4, precision
bf16-true, gradient_checkpointing false, compile true, AdamW. QLoRA: Llama-2-7B's shape with random nf4 weights, rank
64 on all linear layers, rows of alpaca's lengths packed into 8 x 512, precision bf16-true, gradient_checkpointing true;
the peer trains the same tokenised rows 8 at a time, padded to the longest, with gradient checkpointing and logits of
all positions. LoRA: Llama-3.1-8B's shape with random bfloat16 weights, rank 16 on all linear layers, full rows of 4096
tokens, 2 x 16 of them a step, precision bf16-true, gradient_checkpointing false; others publish 12,473 tokens/s and
402 TFLOP/s for it on one H100. Rows: four layers of the 1B shape. `attention` is null everywhere, so each engine takes
the kernel that passes its trial. In the JAX engine layers are scanned one by one, and checkpointing is off.

Speeds are real tokens (no padding) a second, medians of the logged steps after compilation. Each part runs in a process
of its own; one that fails or runs out of time says so in the table, and the others go on.
"""

import argparse
import csv
import json
import math
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from data import make_vocabulary, words, write_instructions

ROOT = Path(__file__).parent.parent
TOKENIZER = str(ROOT / "demo" / "llama")
LOG_EVERY, WARM_UP = 4, 2  # steps between logged rows, and rows that are left out
RANK = 64
Figures = dict[str, float | str]


@dataclass
class Sizes:
    """How large everything is."""

    device: str = "cuda"
    precision: str = "bf16-true"
    matmul: int = 8192
    steps: int = 24
    length: int = 4096
    batch_size: int = 4
    clm: dict[str, int] = field(default_factory=lambda: {
        "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 128_256})
    row_layers: int = 4
    qlora: dict[str, int] = field(default_factory=lambda: {
        "hidden_size": 4096, "intermediate_size": 11_008, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 32, "head_dim": 128, "vocab_size": 32_000})
    sft_length: int = 512
    sft_batch_size: int = 8
    num_rows: int = 4000
    num_lines: int = 1500
    line_words: tuple[int, int] = (60, 900)
    lora: dict[str, int] = field(default_factory=lambda: {
        "hidden_size": 4096, "intermediate_size": 14_336, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 128_256})
    lora_batch_size: int = 16
    lora_steps: int = 12  # ten seconds each

    def clm_config(self, layers: int | None = None) -> dict[str, Any]:
        return {"model_type": "llama", **self.clm, "num_hidden_layers": layers or self.clm["num_hidden_layers"],
                "max_position_embeddings": self.length, "tie_word_embeddings": True}


TOY = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
       "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 4096}
SMOKE = Sizes("cpu", "bf16-true", 128, 12, 64, 2, TOY, 1, {**TOY, "num_key_value_heads": 4}, 64, 2, 60, 60, (5, 20),
              TOY, 2)


# Parts: (sizes, folder that they share, engine) -> figures ----------------------------------------------------------


def ceiling(sizes: Sizes, folder: Path, engine: str) -> Figures:
    """FLOP/s of one large bf16 matrix product."""
    import torch

    left, right = (torch.randn(sizes.matmul, sizes.matmul, device=sizes.device, dtype=torch.bfloat16) for _ in "ab")
    laps = []
    for _ in range(5):
        wait(sizes)
        start = time.perf_counter()
        for _ in range(10):
            left @ right
        wait(sizes)
        laps.append(time.perf_counter() - start)
    name = torch.cuda.get_device_name() if sizes.device == "cuda" else "CPU"
    return {"flops": 20 * sizes.matmul**3 / min(laps), "device": name}


def weights(sizes: Sizes, folder: Path, engine: str) -> Figures:
    """A folder with random nf4 weights as bitsandbytes saves them; made on the device, never written in 16 bits."""
    import torch
    from bitsandbytes.nn import Linear4bit, Params4bit
    from safetensors.torch import save_file
    from transformers import AutoTokenizer, BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM

    tokenizer = AutoTokenizer.from_pretrained(TOKENIZER)
    special = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    config = LlamaConfig(**sizes.qlora, **special, max_position_embeddings=4096, dtype="bfloat16")
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device(sizes.device):
        model = LlamaForCausalLM(config)
    for parent in [module for name, module in model.named_modules() if name.endswith(("self_attn", "mlp"))]:
        for name, linear in parent.named_children():
            if isinstance(linear, torch.nn.Linear):
                packed = Linear4bit(linear.in_features, linear.out_features, bias=False, device="meta",
                                    compute_dtype=torch.bfloat16, quant_type="nf4")
                packed.weight = Params4bit(linear.weight.data, requires_grad=False, quant_type="nf4")
                setattr(parent, name, packed.to(sizes.device))
    config.quantization_config = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16).to_dict()
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(folder / "nf4")
    tokenizer.save_pretrained(folder / "nf4")
    state = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    save_file(state, folder / "nf4" / "model.safetensors", metadata={"format": "pt"})
    return {"gib": (folder / "nf4" / "model.safetensors").stat().st_size / 2**30}


def clm(sizes: Sizes, folder: Path, engine: str) -> Figures:
    """Full training of the 1B shape on full rows."""
    model = {"config": sizes.clm_config(), "compile": sizes.device == "cuda"}
    speed = fit(sizes, folder, engine, "clm", model, text_rows(sizes, folder))
    return {"speed": speed, "peak": peak(sizes, engine)}


def qlora(sizes: Sizes, folder: Path, engine: str) -> Figures:
    """QLoRA of the 7B shape on packed rows."""
    model = {"pretrained": str(folder / "nf4"), "quantize": "nf4", "gradient_checkpointing": True,
             "lora": {"rank": RANK, "alpha": 16, "targets": "all-linear"}}
    speed = fit(sizes, folder, engine, "qlora", model, sft_rows(sizes, folder) | {"packing": True}, "SFT")
    return {"speed": speed, "peak": peak(sizes, engine)}


def lora_weights(sizes: Sizes, folder: Path, engine: str) -> Figures:
    """A folder with random bfloat16 weights."""
    import torch
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(**sizes.lora, max_position_embeddings=sizes.length, dtype="bfloat16")
    torch.set_default_dtype(torch.bfloat16)
    with torch.device(sizes.device):
        LlamaForCausalLM(config).save_pretrained(folder / "bf16")
    AutoTokenizer.from_pretrained(TOKENIZER).save_pretrained(folder / "bf16")
    return {"gib": sum(path.stat().st_size for path in (folder / "bf16").glob("*.safetensors")) / 2**30}


def lora(sizes: Sizes, folder: Path, engine: str) -> Figures:
    """LoRA of the 8B shape on full rows, two micro-batches a step."""
    model = {"pretrained": str(folder / "bf16"),
             "lora": {"rank": 16, "alpha": 16, "targets": "all-linear"}, "compile": sizes.device == "cuda"}
    data = text_rows(sizes, folder) | {"batch_size": sizes.lora_batch_size}
    trainer = {"max_steps": sizes.lora_steps, "accumulate_grad_batches": 2}
    return {"speed": fit(sizes, folder, engine, "lora", model, data, trainer=trainer), "peak": peak(sizes, engine)}


def rows(sizes: Sizes, folder: Path, engine: str) -> Figures:
    """Isolation of packed documents; speed packed and padded; and with one batch repeated in place of the loader."""
    model = {"config": sizes.clm_config(sizes.row_layers)}
    kinds = {"padded": {"join": False, "pad_to_multiple_of": sizes.length}, "packed": {"join": None, "packing": True},
             "full": {}, "repeated": {}}
    found = (torch_leaks if engine == "torch" else jax_leaks)(sizes)
    for kind, options in kinds.items():
        if kind == "repeated":
            repeat_first_batch()
        found[kind] = fit(sizes, folder, engine, f"rows-{kind}", model, text_rows(sizes, folder) | options)
    return found


def peer(sizes: Sizes, folder: Path, engine: str) -> Figures:
    """The same nf4 base and rows with TRL's SFTTrainer at its defaults, else with transformers' Trainer and PEFT."""
    import datasets
    import torch
    import transformers
    from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training

    cpu = sizes.device == "cpu"
    examples = tokenised(sizes, folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "nf4")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "nf4", dtype=torch.bfloat16,
                                                              device_map={"": sizes.device})
    adapter = LoraConfig(r=RANK, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")
    ends, counts = [], []

    class Clock(transformers.TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            wait(sizes)
            ends.append(time.perf_counter())

    common = {"output_dir": str(folder / "peer"), "per_device_train_batch_size": sizes.sft_batch_size,
              "max_steps": sizes.steps, "report_to": "none", "save_strategy": "no", "disable_tqdm": True,
              "use_cpu": cpu, "bf16": not cpu}
    try:
        import trl
    except ImportError:
        name = f"transformers {transformers.__version__} Trainer + peft"
        model = get_peft_model(prepare_model_for_kbit_training(
            model, gradient_checkpointing_kwargs={"use_reentrant": False}), adapter)
        trainer = transformers.Trainer(
            model, transformers.TrainingArguments(**common, gradient_checkpointing=True,
                                                  gradient_checkpointing_kwargs={"use_reentrant": False}),
            train_dataset=examples, data_collator=transformers.DataCollatorForSeq2Seq(tokenizer))
    else:
        name = f"trl {trl.__version__} SFTTrainer"
        masked = [{"input_ids": row["input_ids"], "completion_mask": [int(x != -100) for x in row["labels"]]}
                  for row in examples]
        trainer = trl.SFTTrainer(model, trl.SFTConfig(**common, max_length=sizes.sft_length, completion_only_loss=True),
                                 train_dataset=datasets.Dataset.from_list(masked), processing_class=tokenizer,
                                 peft_config=adapter)
    collate = trainer.data_collator

    def counting(batch: list[dict]) -> dict:
        counts.append(sum(len(row["input_ids"]) for row in batch))
        return collate(batch)

    trainer.data_collator = counting
    trainer.add_callback(Clock())
    trainer.train()
    laps = [after - before for before, after in zip(ends[LOG_EVERY:], ends[LOG_EVERY + 1 :], strict=False)]
    return {"speed": statistics.mean(counts) / statistics.median(laps), "peak": peak(sizes, "torch"), "name": name}


# What the parts are made of -----------------------------------------------------------------------------------------


def fit(sizes: Sizes, folder: Path, engine: str, name: str, model: dict, data: dict, task: str = "CLM",  # noqa: PLR0913
        trainer: dict | None = None) -> float:
    """Run a recipe in this process; median real tokens a second."""
    from lmmods.cli import main

    out = folder / f"{name}-{engine}"
    optimizer = {"lr": 1e-4, "schedule": "constant"}
    recipe = {
        "engine": engine, "seed_everything": 1,
        "trainer": {"max_steps": sizes.steps, "accelerator": "cpu" if sizes.device == "cpu" else "gpu", "devices": 1,
                    "precision": sizes.precision, "num_sanity_val_steps": 0, "limit_val_batches": 0,
                    "log_every_n_steps": LOG_EVERY, "enable_checkpointing": False, "enable_progress_bar": False,
                    "default_root_dir": str(out), **(trainer or {})},
        "model": {"class_path": task, "init_args": {**model, "optimizer": optimizer}},
        "data": {"class_path": f"{task}Data", "init_args": data},
    }
    path = folder / f"{name}-{engine}.yaml"
    path.write_text(yaml.safe_dump(recipe))
    if status := main(["fit", "--config", str(path)]):
        raise SystemExit(status)
    with open(out / "metrics.csv", newline="") as file:
        speeds = [float(row["train/tokens_per_second"]) for row in csv.DictReader(file)]
    shutil.rmtree(out)  # a model of gigabytes may be in it
    return statistics.median(speeds[WARM_UP:])


def text_rows(sizes: Sizes, folder: Path) -> dict[str, Any]:
    """Documents of 60 to 900 invented words, one a line, as full rows."""
    path = folder / "lines.txt"
    if not path.exists():
        rng = random.Random(2)
        vocabulary = make_vocabulary(rng)
        path.write_text("\n".join(words(rng.randint(*sizes.line_words), rng, vocabulary)
                                  for _ in range(sizes.num_lines)))
    return {"source": str(path), "documents": "line", "tokenizer": TOKENIZER, "max_length": sizes.length,
            "batch_size": sizes.batch_size, "join": True}


def sft_rows(sizes: Sizes, folder: Path) -> dict[str, Any]:
    """Instructions of alpaca's lengths."""
    path = folder / "rows.jsonl"
    if not path.exists():
        write_instructions(path, sizes.num_rows)
    return {"source": str(path), "template": "alpaca", "max_length": sizes.sft_length,
            "batch_size": sizes.sft_batch_size}


def tokenised(sizes: Sizes, folder: Path) -> list[dict[str, list[int]]]:
    """The rows that our data module makes of these instructions: `input_ids` and `labels`."""
    from lmmods.data.sft import SFTData

    data = SFTData(**sft_rows(sizes, folder) | {"batch_size": 1, "pad_to_multiple_of": 1}, tokenizer=TOKENIZER, seed=1)
    data.setup("fit")
    wanted = sizes.steps * sizes.sft_batch_size
    return [{name: batch[name][0].tolist() for name in ("input_ids", "labels")}
            for _, batch in zip(range(wanted), data.train_batches(), strict=False)]


def repeat_first_batch() -> None:
    """From now on our loaders hand out their first batch for ever, at no cost."""
    from lmmods.data.batch.loader import StatefulLoader

    begin = StatefulLoader.__iter__

    def repeat(self: StatefulLoader) -> Any:
        first = next(begin(self))
        while True:
            yield first

    StatefulLoader.__iter__ = repeat


def documents(sizes: Sizes) -> tuple[list[int], slice, list[int]]:
    """Ids of three documents end to end, the place of the second, and positions that restart in each."""
    rng = random.Random(3)
    quarter, half = sizes.length // 4, sizes.length // 2
    positions = [*range(quarter), *range(half), *range(sizes.length - quarter - half)]
    return [rng.randrange(10, 500) for _ in positions], slice(quarter, quarter + half), positions


def torch_leaks(sizes: Sizes) -> Figures:
    """Difference of a document's bf16 logits, alone and packed, over the largest logit: isolated, and joined."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from lmmods.torch_engine.nn.attention import prefer_varlen

    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**sizes.clm_config(sizes.row_layers))).to(sizes.device, torch.bfloat16).eval()
    prefer_varlen(model)
    packed, place, positions = documents(sizes)

    def logits(ids: list[int], position_ids: list[int]) -> torch.Tensor:
        ids, position_ids = (torch.tensor([x], device=sizes.device) for x in (ids, position_ids))
        with torch.no_grad():
            return model(input_ids=ids, position_ids=position_ids, use_cache=False).logits[0].float()

    alone = logits(packed[place], positions[place])
    return {name: ((logits(packed, ids)[place] - alone).abs().max() / alone.abs().max()).item()
            for name, ids in {"leak": positions, "joined": list(range(len(packed)))}.items()}


def jax_leaks(sizes: Sizes) -> Figures:
    """As `torch_leaks`."""
    import jax
    import jax.numpy as jnp

    from jax_engine.models import hub
    from lmmods.core.hf_config import load_config

    network = hub.network(load_config(sizes.clm_config(sizes.row_layers)), "causal", compute_dtype="bfloat16")
    params = jax.device_put(network.init(0, "bfloat16"))
    packed, place, positions = documents(sizes)
    run = jax.jit(lambda batch: network.logits(params, network.hidden(params, batch)[0]))
    row = {"input_ids": jnp.array([packed])}
    apart = row | {"position_ids": jnp.array([positions]), "segment_ids": jnp.cumsum(jnp.array(positions) == 0)[None]}
    alone = run({"input_ids": jnp.array([packed[place]])})
    return {name: float(jnp.abs(run(batch)[place] - alone).max() / jnp.abs(alone).max())
            for name, batch in {"leak": apart, "joined": row}.items()}


def wait(sizes: Sizes) -> None:
    if sizes.device == "cuda":
        import torch

        torch.cuda.synchronize()


def peak(sizes: Sizes, engine: str) -> float:
    """GiB that this process has had in use at once on the device; nan on the CPU."""
    if sizes.device == "cpu":
        return float("nan")
    if engine == "jax":
        import jax

        return jax.local_devices()[0].memory_stats()["peak_bytes_in_use"] / 2**30
    import torch

    return torch.cuda.max_memory_allocated() / 2**30


# The program ----------------------------------------------------------------------------------------------------------

# Name of a part -> what it runs, for which engine, and the seconds after which it is stopped.
PARTS: dict[str, tuple[Callable[[Sizes, Path, str], Figures], str, int]] = {
    "ceiling": (ceiling, "torch", 60), "clm-torch": (clm, "torch", 120), "clm-jax": (clm, "jax", 180),
    "weights": (weights, "torch", 120), "qlora-torch": (qlora, "torch", 120), "peer": (peer, "torch", 120),
    "qlora-jax": (qlora, "jax", 180), "rows-torch": (rows, "torch", 120), "rows-jax": (rows, "jax", 180),
    "lora-weights": (lora_weights, "torch", 120), "lora-torch": (lora, "torch", 240), "lora-jax": (lora, "jax", 300)}


def run_part(name: str, folder: Path, smoke: bool, seconds: float) -> Figures:
    """A part in a process of its own: its figures, or `error`."""
    log = folder / f"{name}.log"
    environment = {**os.environ, "LMMODS_CACHE": str(folder / "cache"),
                   "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, __file__, "--part", name, "--folder", str(folder), *["--smoke"] * smoke]
    start = time.perf_counter()
    with log.open("w") as file:
        try:
            subprocess.run(command, stdout=file, stderr=subprocess.STDOUT, env=environment, timeout=seconds, check=True)
            found = json.loads((folder / f"{name}.json").read_text())
        except subprocess.TimeoutExpired:
            found = {"error": f"stopped after {seconds:.0f} s"}
        except subprocess.CalledProcessError:
            found = {"error": (log.read_text().strip().splitlines() or ["no word"])[-1][:150]}
    for line in log.read_text().splitlines():
        if line.startswith("Attention:"):
            print(f"  {line}")
    print(f"{name}: {time.perf_counter() - start:.0f} s {found}", flush=True)
    return found


def parameters(shape: dict[str, int], heads: int = 1) -> int:
    """Parameters of the matrices of a Llama; `heads` of its size, 2 where embedding and output head are two."""
    per_layer = shape["hidden_size"] * (
        shape["head_dim"] * 2 * (shape["num_attention_heads"] + shape["num_key_value_heads"])
        + 3 * shape["intermediate_size"])
    return shape["num_hidden_layers"] * per_layer + heads * shape["vocab_size"] * shape["hidden_size"]


def table(found: dict[str, Figures], sizes: Sizes) -> str:
    """All figures as Markdown; what failed is said by the lines before it."""
    from lmmods.core.hardware import peak_flops

    shape, num_params = sizes.clm, parameters(sizes.clm)
    # Queries times keys and weights times values, of the half that a causal mask leaves, forward and twice backward.
    scores = 6 * shape["num_hidden_layers"] * shape["num_attention_heads"] * shape["head_dim"] * sizes.length
    lora_params = parameters(sizes.lora, 2)
    card = {"device": "", "flops": math.nan} | found.get("ceiling", {})
    sheet = peak_flops(card["device"]) or math.nan

    def cell(part: str, form: str, *of: Callable[[Figures], Any]) -> str:
        figures = found.get(part)
        if figures is None or "error" in figures:
            return "not run" if figures is None else "failed"
        return form.format(*[value(figures) for value in of], **figures)

    def line(what: str, part: str, form: str, *of: Callable[[Figures], Any], beside: str = "", target: str = "") -> str:
        cells = [cell(f"{part}-{engine}", form, *of) for engine in ("torch", "jax")]
        return f"| {' | '.join([what, *cells, beside, target])} |"

    def against(name: str) -> Callable[[Figures], float]:
        return lambda figures: figures[name] / found.get("peer", {}).get(name, math.nan)

    def mfu(flops: float, of: float) -> Callable[[Figures], float]:
        return lambda figures: flops * figures["speed"] / of

    speed, memory = "{speed:,.0f} tokens/s", "{peak:.1f} GiB"
    return "\n".join([
        "| what | torch | jax | beside | target |",
        "|---|---|---|---|---|",
        f"| bf16 matrix product, TFLOP/s | {card['flops'] / 1e12:.0f} | | data sheet {sheet / 1e12:.0f} | |",
        line(f"causal LM, {num_params / 1e9:.2f} B, rows of {sizes.length}", "clm", speed),
        line("MFU, 6 N, of the data sheet", "clm", "{:.1%}", mfu(6 * num_params, sheet), target="50 %"),
        line(f"with attention, + {scores:,} FLOP/token", "clm", "{:.1%}", mfu(6 * num_params + scores, sheet)),
        line("with attention, of the measured product", "clm", "{:.1%}", mfu(6 * num_params + scores, card["flops"])),
        line("peak memory", "clm", memory),
        line("QLoRA, 7B", "qlora", speed, beside=cell("peer", speed + ", {name}")),
        line("against the peer", "qlora", "{:.2f} x", against("speed"), target="1.8 x"),
        line("peak memory", "qlora", memory, beside=cell("peer", memory)),
        line("against the peer", "qlora", "{:.2f} x", against("peak"), target="0.60 x"),
        line(f"LoRA, {lora_params / 1e9:.2f} B, rows of {sizes.length}", "lora", speed, beside="12,473 published"),
        line("TFLOP/s, 4 N", "lora", "{:.0f}", lambda f: 4e-12 * lora_params * f["speed"], beside="402 published"),
        line("peak memory", "lora", memory),
        line("packed documents, leak / largest logit", "rows", "{leak:.1e}, without isolation {joined:.1e}"),
        line(f"rows padded to {sizes.length}", "rows", "{padded:,.0f} tokens/s", beside=f"{sizes.row_layers} layers"),
        line("packed", "rows", "{packed:,.0f} tokens/s, {:.1f} x", lambda f: f["packed"] / f["padded"]),
        line("full rows", "rows", "{full:,.0f} tokens/s"),
        line("waiting for data", "rows", "{:.1%}", lambda f: 1 - f["full"] / f["repeated"],
             beside="share of a step, against one batch repeated"),
    ])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--minutes", type=float, default=8)
    parser.add_argument("--smoke", action="store_true", help="toy sizes on the CPU")
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    sizes = SMOKE if args.smoke else Sizes()
    if args.part:
        part, engine, _ = PARTS[args.part]
        found = part(sizes, args.folder, engine)
        (args.folder / f"{args.part}.json").write_text(json.dumps(found))
        return
    end, found = time.perf_counter() + 60 * args.minutes, {}
    with tempfile.TemporaryDirectory() as name:
        for part in args.parts:
            left = end - time.perf_counter()
            found[part] = run_part(part, Path(name), args.smoke, min(left, PARTS[part][2])) if left > 20 else {
                "error": "skipped, no time left"}
    print(f"\n{found.get('ceiling', {}).get('device', '')}\n\n{table(found, sizes)}")


if __name__ == "__main__":
    main()
