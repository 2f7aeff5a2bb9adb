"""Measure both engines on one NVIDIA GPU, with the real trainers, in less than eight minutes; prints a Markdown table.

    python benchmarks/gpu.py
    python benchmarks/gpu.py --parts ceiling clm-torch clm-jax
    python benchmarks/gpu.py --smoke             toy sizes on the CPU, only to test the program

Recipe fields. Causal LM: Llama-3.2-1B's shape with random weights, rows of 4096 tokens, batch_size 4, precision
bf16-true, gradient_checkpointing false, compile true, AdamW. QLoRA: Llama-2-7B's shape with random nf4 weights, rank
64 on all linear layers, rows of alpaca's lengths packed into 8 x 512, precision bf16-true, gradient_checkpointing true;
the peer trains the same tokenised rows in batches of 8, padded to the longest, with gradient checkpointing and logits
of all positions. LoRA: Llama-3.1-8B's shape with random bfloat16 weights, rank 16 on all linear layers, full rows of
4096 tokens, 2 x 16 rows per step, precision bf16-true, gradient_checkpointing false; others publish 12,473 tokens/s
and 402 TFLOP/s for it on one H100. Rows: four layers of the 1B shape. `attention` is null everywhere, so each engine
uses the kernel that passes its trial. In the JAX engine, layers are scanned one by one, and checkpointing is off.

Speeds are real tokens (no padding) per second, medians of the logged steps after compilation. Each part runs in its own
process. If one fails or times out, the table says so and the others continue.
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
from data import make_text, make_vocabulary, write_instructions

ROOT = Path(__file__).parent.parent
TOKENIZER = str(ROOT / "demo" / "llama")
LOG_EVERY, WARM_UP = 4, 2  # steps between logged rows, and number of first rows that are ignored
RANK = 64
Figures = dict[str, float | str]


@dataclass
class Sizes:
    """Sizes of all parts."""

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


# Parts: (sizes, shared folder, engine) -> figures -------------------------------------------------------------------


def measure_ceiling(sizes: Sizes, folder: Path, engine: str) -> Figures:
    """Measure the FLOP/s of one large bf16 matrix product."""
    import torch

    left, right = (torch.randn(sizes.matmul, sizes.matmul, device=sizes.device, dtype=torch.bfloat16) for _ in "ab")
    laps = []
    for _ in range(5):
        synchronise(sizes)
        start = time.perf_counter()
        for _ in range(10):
            left @ right
        synchronise(sizes)
        laps.append(time.perf_counter() - start)
    name = torch.cuda.get_device_name() if sizes.device == "cuda" else "CPU"
    return {"flops": 20 * sizes.matmul**3 / min(laps), "device": name}


def write_nf4_weights(sizes: Sizes, folder: Path, engine: str) -> Figures:
    """Write a folder with random nf4 weights as bitsandbytes saves them, created on the device."""
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


def train_clm(sizes: Sizes, folder: Path, engine: str) -> Figures:
    """Measure full training of the 1B shape on full rows."""
    model = {"config": sizes.clm_config(), "compile": sizes.device == "cuda"}
    speed = run_fit(sizes, folder, engine, "clm", model, write_text_rows(sizes, folder))
    return {"speed": speed, "peak": peak_memory(sizes, engine)}


def train_qlora(sizes: Sizes, folder: Path, engine: str) -> Figures:
    """Measure QLoRA of the 7B shape on packed rows."""
    model = {"pretrained": str(folder / "nf4"), "quantize": "nf4", "gradient_checkpointing": True,
             "lora": {"rank": RANK, "alpha": 16, "targets": "all-linear"}}
    speed = run_fit(sizes, folder, engine, "qlora", model, write_sft_rows(sizes, folder) | {"packing": True}, "SFT")
    return {"speed": speed, "peak": peak_memory(sizes, engine)}


def write_bf16_weights(sizes: Sizes, folder: Path, engine: str) -> Figures:
    """Write a folder with random bfloat16 weights."""
    import torch
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(**sizes.lora, max_position_embeddings=sizes.length, dtype="bfloat16")
    torch.set_default_dtype(torch.bfloat16)
    with torch.device(sizes.device):
        LlamaForCausalLM(config).save_pretrained(folder / "bf16")
    AutoTokenizer.from_pretrained(TOKENIZER).save_pretrained(folder / "bf16")
    return {"gib": sum(path.stat().st_size for path in (folder / "bf16").glob("*.safetensors")) / 2**30}


def train_lora(sizes: Sizes, folder: Path, engine: str) -> Figures:
    """Measure LoRA of the 8B shape on full rows, with two micro-batches per step."""
    model = {"pretrained": str(folder / "bf16"),
             "lora": {"rank": 16, "alpha": 16, "targets": "all-linear"}, "compile": sizes.device == "cuda"}
    data = write_text_rows(sizes, folder) | {"batch_size": sizes.lora_batch_size}
    trainer = {"max_steps": sizes.lora_steps, "accumulate_grad_batches": 2}
    speed = run_fit(sizes, folder, engine, "lora", model, data, trainer=trainer)
    return {"speed": speed, "peak": peak_memory(sizes, engine)}


def compare_rows(sizes: Sizes, folder: Path, engine: str) -> Figures:
    """Measure the isolation of packed documents, and the speed of padded, packed, full and repeated batches."""
    model = {"config": sizes.clm_config(sizes.row_layers)}
    variants = {"padded": {"join": False, "pad_to_multiple_of": sizes.length},
                "packed": {"join": None, "packing": True}, "full": {}, "repeated": {}}
    figures = (torch_leakage if engine == "torch" else jax_leakage)(sizes)
    for variant, options in variants.items():
        if variant == "repeated":
            repeat_first_batch()
        data = write_text_rows(sizes, folder) | options
        figures[variant] = run_fit(sizes, folder, engine, f"rows-{variant}", model, data)
    return figures


def train_peer(sizes: Sizes, folder: Path, engine: str) -> Figures:
    """Measure the same nf4 base and rows with TRL's SFTTrainer by default, or with transformers' Trainer and PEFT."""
    import datasets
    import torch
    import transformers
    from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training

    is_cpu = sizes.device == "cpu"
    examples = tokenise_rows(sizes, folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "nf4")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "nf4", dtype=torch.bfloat16,
                                                              device_map={"": sizes.device})
    adapter = LoraConfig(r=RANK, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")
    end_times, token_counts = [], []

    class Clock(transformers.TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            synchronise(sizes)
            end_times.append(time.perf_counter())

    common = {"output_dir": str(folder / "peer"), "per_device_train_batch_size": sizes.sft_batch_size,
              "max_steps": sizes.steps, "report_to": "none", "save_strategy": "no", "disable_tqdm": True,
              "use_cpu": is_cpu, "bf16": not is_cpu}
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

    def count_tokens(batch: list[dict]) -> dict:
        token_counts.append(sum(len(row["input_ids"]) for row in batch))
        return collate(batch)

    trainer.data_collator = count_tokens
    trainer.add_callback(Clock())
    trainer.train()
    laps = [after - before for before, after in zip(end_times[LOG_EVERY:], end_times[LOG_EVERY + 1 :], strict=False)]
    return {"speed": statistics.mean(token_counts) / statistics.median(laps), "peak": peak_memory(sizes, "torch"),
            "name": name}


# Helpers ------------------------------------------------------------------------------------------------------------


def run_fit(sizes: Sizes, folder: Path, engine: str, name: str, model: dict, data: dict, task: str = "CLM",  # noqa: PLR0913
            trainer: dict | None = None) -> float:
    """Run a recipe in this process and return the median of real tokens per second."""
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
    shutil.rmtree(out)  # it may contain a model of several gigabytes
    return statistics.median(speeds[WARM_UP:])


def write_text_rows(sizes: Sizes, folder: Path) -> dict[str, Any]:
    """Write documents of 60 to 900 invented words, one per line, and return the data fields for full rows."""
    path = folder / "lines.txt"
    if not path.exists():
        rng = random.Random(2)
        vocabulary = make_vocabulary(rng)
        path.write_text("\n".join(make_text(rng.randint(*sizes.line_words), rng, vocabulary)
                                  for _ in range(sizes.num_lines)))
    return {"source": str(path), "documents": "line", "tokenizer": TOKENIZER, "max_length": sizes.length,
            "batch_size": sizes.batch_size, "join": True}


def write_sft_rows(sizes: Sizes, folder: Path) -> dict[str, Any]:
    """Write instructions with lengths like alpaca's, and return the data fields."""
    path = folder / "rows.jsonl"
    if not path.exists():
        write_instructions(path, sizes.num_rows)
    return {"source": str(path), "template": "alpaca", "max_length": sizes.sft_length,
            "batch_size": sizes.sft_batch_size}


def tokenise_rows(sizes: Sizes, folder: Path) -> list[dict[str, list[int]]]:
    """Return the `input_ids` and `labels` of these instructions, as encoded by our data module."""
    from lmmods.data.sft import SFTData

    data = SFTData(**write_sft_rows(sizes, folder) | {"batch_size": 1, "pad_to_multiple_of": 1}, tokenizer=TOKENIZER,
                   seed=1)
    data.setup("fit")
    num_rows = sizes.steps * sizes.sft_batch_size
    return [{name: batch[name][0].tolist() for name in ("input_ids", "labels")}
            for _, batch in zip(range(num_rows), data.train_batches(), strict=False)]


def repeat_first_batch() -> None:
    """Patch our loaders to repeat their first batch forever, at no cost."""
    from lmmods.data.batch.loader import StatefulLoader

    original_iter = StatefulLoader.__iter__

    def repeat(self: StatefulLoader) -> Any:
        first = next(original_iter(self))
        while True:
            yield first

    StatefulLoader.__iter__ = repeat


def make_documents(sizes: Sizes) -> tuple[list[int], slice, list[int]]:
    """Return the ids of three concatenated documents, the slice of the second, and positions that restart in each."""
    rng = random.Random(3)
    quarter, half = sizes.length // 4, sizes.length // 2
    positions = [*range(quarter), *range(half), *range(sizes.length - quarter - half)]
    return [rng.randrange(10, 500) for _ in positions], slice(quarter, quarter + half), positions


def torch_leakage(sizes: Sizes) -> Figures:
    """Return the difference of a document's bf16 logits when packed, relative to the largest logit.

    `leak` is with isolated documents, `joined` without isolation.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from lmmods.torch_engine.nn.attention import prefer_varlen

    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**sizes.clm_config(sizes.row_layers))).to(sizes.device, torch.bfloat16).eval()
    prefer_varlen(model)
    packed, span, positions = make_documents(sizes)

    def logits(ids: list[int], position_ids: list[int]) -> torch.Tensor:
        ids, position_ids = (torch.tensor([x], device=sizes.device) for x in (ids, position_ids))
        with torch.no_grad():
            return model(input_ids=ids, position_ids=position_ids, use_cache=False).logits[0].float()

    alone = logits(packed[span], positions[span])
    return {name: ((logits(packed, ids)[span] - alone).abs().max() / alone.abs().max()).item()
            for name, ids in {"leak": positions, "joined": list(range(len(packed)))}.items()}


def jax_leakage(sizes: Sizes) -> Figures:
    """Return the same as `torch_leakage`, for JAX."""
    import jax
    import jax.numpy as jnp

    from jax_engine.models import hub
    from lmmods.core.hf_config import load_config

    network = hub.network(load_config(sizes.clm_config(sizes.row_layers)), "causal", compute_dtype="bfloat16")
    params = jax.device_put(network.init(0, "bfloat16"))
    packed, span, positions = make_documents(sizes)
    run = jax.jit(lambda batch: network.logits(params, network.hidden(params, batch)[0]))
    row = {"input_ids": jnp.array([packed])}
    segment_ids = jnp.cumsum(jnp.array(positions) == 0)[None]
    isolated = row | {"position_ids": jnp.array([positions]), "segment_ids": segment_ids}
    alone = run({"input_ids": jnp.array([packed[span]])})
    return {name: float(jnp.abs(run(batch)[span] - alone).max() / jnp.abs(alone).max())
            for name, batch in {"leak": isolated, "joined": row}.items()}


def synchronise(sizes: Sizes) -> None:
    if sizes.device == "cuda":
        import torch

        torch.cuda.synchronize()


def peak_memory(sizes: Sizes, engine: str) -> float:
    """Return the peak memory of this process on the device in GiB; nan on the CPU."""
    if sizes.device == "cpu":
        return float("nan")
    if engine == "jax":
        import jax

        return jax.local_devices()[0].memory_stats()["peak_bytes_in_use"] / 2**30
    import torch

    return torch.cuda.max_memory_allocated() / 2**30


# The program ----------------------------------------------------------------------------------------------------------

# Name of a part -> its function, its engine, and the timeout in seconds.
PARTS: dict[str, tuple[Callable[[Sizes, Path, str], Figures], str, int]] = {
    "ceiling": (measure_ceiling, "torch", 60),
    "clm-torch": (train_clm, "torch", 120), "clm-jax": (train_clm, "jax", 180),
    "weights": (write_nf4_weights, "torch", 120), "qlora-torch": (train_qlora, "torch", 120),
    "peer": (train_peer, "torch", 120), "qlora-jax": (train_qlora, "jax", 180),
    "rows-torch": (compare_rows, "torch", 120), "rows-jax": (compare_rows, "jax", 180),
    "lora-weights": (write_bf16_weights, "torch", 120), "lora-torch": (train_lora, "torch", 240),
    "lora-jax": (train_lora, "jax", 300)}


def run_part(name: str, folder: Path, smoke: bool, seconds: float) -> Figures:
    """Run a part in its own process and return its figures, or `error`."""
    log = folder / f"{name}.log"
    environment = {**os.environ, "LMMODS_CACHE": str(folder / "cache"),
                   "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, __file__, "--part", name, "--folder", str(folder), *["--smoke"] * smoke]
    start = time.perf_counter()
    with log.open("w") as file:
        try:
            subprocess.run(command, stdout=file, stderr=subprocess.STDOUT, env=environment, timeout=seconds, check=True)
            figures = json.loads((folder / f"{name}.json").read_text())
        except subprocess.TimeoutExpired:
            figures = {"error": f"stopped after {seconds:.0f} s"}
        except subprocess.CalledProcessError:
            figures = {"error": (log.read_text().strip().splitlines() or ["no output"])[-1][:150]}
    for line in log.read_text().splitlines():
        if line.startswith("Attention:"):
            print(f"  {line}")
    print(f"{name}: {time.perf_counter() - start:.0f} s {figures}", flush=True)
    return figures


def num_parameters(shape: dict[str, int], heads: int = 1) -> int:
    """Return the number of parameters in a Llama's matrices; `heads` is 2 if embedding and output head are not tied."""
    per_layer = shape["hidden_size"] * (
        shape["head_dim"] * 2 * (shape["num_attention_heads"] + shape["num_key_value_heads"])
        + 3 * shape["intermediate_size"])
    return shape["num_hidden_layers"] * per_layer + heads * shape["vocab_size"] * shape["hidden_size"]


def make_table(results: dict[str, Figures], sizes: Sizes) -> str:
    """Return all figures as a Markdown table; the lines printed before it explain failures."""
    from lmmods.core.hardware import peak_flops

    shape, num_params = sizes.clm, num_parameters(sizes.clm)
    # FLOP of queries times keys and weights times values, halved by the causal mask, once forward and twice backward.
    scores = 6 * shape["num_hidden_layers"] * shape["num_attention_heads"] * shape["head_dim"] * sizes.length
    lora_params = num_parameters(sizes.lora, 2)
    card = {"device": "", "flops": math.nan} | results.get("ceiling", {})
    nominal = peak_flops(card["device"]) or math.nan

    def cell(part: str, template: str, *functions: Callable[[Figures], Any]) -> str:
        figures = results.get(part)
        if figures is None or "error" in figures:
            return "not run" if figures is None else "failed"
        return template.format(*[value(figures) for value in functions], **figures)

    def line(title: str, part: str, template: str, *functions: Callable[[Figures], Any], note: str = "",
             target: str = "") -> str:
        cells = [cell(f"{part}-{engine}", template, *functions) for engine in ("torch", "jax")]
        return f"| {' | '.join([title, *cells, note, target])} |"

    def against(name: str) -> Callable[[Figures], float]:
        return lambda figures: figures[name] / results.get("peer", {}).get(name, math.nan)

    def mfu(flops: float, peak: float) -> Callable[[Figures], float]:
        return lambda figures: flops * figures["speed"] / peak

    speed, memory = "{speed:,.0f} tokens/s", "{peak:.1f} GiB"
    return "\n".join([
        "| what | torch | jax | note | target |",
        "|---|---|---|---|---|",
        f"| bf16 matrix product, TFLOP/s | {card['flops'] / 1e12:.0f} | | data sheet {nominal / 1e12:.0f} | |",
        line(f"causal LM, {num_params / 1e9:.2f} B, rows of {sizes.length}", "clm", speed),
        line("MFU, 6 N, of the data sheet", "clm", "{:.1%}", mfu(6 * num_params, nominal), target="50 %"),
        line(f"with attention, + {scores:,} FLOP/token", "clm", "{:.1%}", mfu(6 * num_params + scores, nominal)),
        line("with attention, of the measured product", "clm", "{:.1%}", mfu(6 * num_params + scores, card["flops"])),
        line("peak memory", "clm", memory),
        line("QLoRA, 7B", "qlora", speed, note=cell("peer", speed + ", {name}")),
        line("against the peer", "qlora", "{:.2f} x", against("speed"), target="1.8 x"),
        line("peak memory", "qlora", memory, note=cell("peer", memory)),
        line("against the peer", "qlora", "{:.2f} x", against("peak"), target="0.60 x"),
        line(f"LoRA, {lora_params / 1e9:.2f} B, rows of {sizes.length}", "lora", speed, note="12,473 published"),
        line("TFLOP/s, 4 N", "lora", "{:.0f}", lambda f: 4e-12 * lora_params * f["speed"], note="402 published"),
        line("peak memory", "lora", memory),
        line("packed documents, leak / largest logit", "rows", "{leak:.1e}, without isolation {joined:.1e}"),
        line(f"rows padded to {sizes.length}", "rows", "{padded:,.0f} tokens/s", note=f"{sizes.row_layers} layers"),
        line("packed", "rows", "{packed:,.0f} tokens/s, {:.1f} x", lambda f: f["packed"] / f["padded"]),
        line("full rows", "rows", "{full:,.0f} tokens/s"),
        line("waiting for data", "rows", "{:.1%}", lambda f: 1 - f["full"] / f["repeated"],
             note="fraction of a step, compared with one repeated batch"),
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
        figures = part(sizes, args.folder, engine)
        (args.folder / f"{args.part}.json").write_text(json.dumps(figures))
        return
    end, results = time.perf_counter() + 60 * args.minutes, {}
    with tempfile.TemporaryDirectory() as name:
        for part in args.parts:
            seconds_left = end - time.perf_counter()
            if seconds_left > 20:
                results[part] = run_part(part, Path(name), args.smoke, min(seconds_left, PARTS[part][2]))
            else:
                results[part] = {"error": "skipped, no time left"}
    print(f"\n{results.get('ceiling', {}).get('device', '')}\n\n{make_table(results, sizes)}")


if __name__ == "__main__":
    main()
