"""Measure both engines on one NVIDIA GPU, with the real trainers, and peers on the same rows; prints Markdown tables.

    python benchmarks/gpu.py                           everything, about half an hour
    python benchmarks/gpu.py --only qlora --sides torch jax "TRL + Liger, packed"
    python benchmarks/gpu.py --profile                 where the time of a step goes, on both engines
    python benchmarks/gpu.py --smoke [--profile]       toy sizes on the CPU, only to test the program

Trainings: `clm` is full fine-tuning of Llama-3.2-1B's shape on full rows of 4096 tokens, compiled on torch; `qlora` is
Llama-2-7B's shape in nf4, rank 64 on all linear layers, rows of alpaca's lengths; `lora` is Llama-3.1-8B's shape, rank
16 on all linear layers, full rows of 4096 tokens, compiled on torch, for which NeMo Automodel publishes 12,473 tokens/s
and 402 TFLOP/s on one H100. Weights are random and in bfloat16, as is the precision (bf16-true). Nobody checkpoints
gradients. `attention` is null everywhere, so each engine uses the kernel that passes its trial. Targets on torch: an
MFU of 50 % in `clm`, and in `qlora` 1.8 times the speed and 0.6 times the memory of each peer.

Speeds are real tokens (no padding) per second, medians of rounds after compilation. Each side runs in its own process,
with the same weights and rows, and must compute the same loss before training (relative 3e-2). A side that cannot be
installed, fails or times out is a row with its error. Peers are installed as by bench.py; an environment that exists in
benchmarks/.environments, with a file `ready`, is used as it is. `rows` are four layers of the 1B shape.
`sampling` is the time of 64 answers of 256 tokens with the 1B shape, 8 to each of 8 prompts of 64 tokens; the target on
torch is 1.2 s.
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
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml
from bench import GROUPED, LOSS_TOLERANCE, UNCHECKPOINTED, Peer, make_environment
from data import make_text, make_vocabulary, write_instructions
from pair import Side, run_sides
from roofline import GROUPS, run_worker
from work import TASKS, Work

ROOT = Path(__file__).parent.parent
TOKENIZER = str(ROOT / "demo" / "llama")
LOG_EVERY, WARM_UP = 4, 2  # steps between logged rows, and number of first rows that are ignored
ROUNDS, TRACED = 3, 3  # of speed; steps of a profile
SUM_TOLERANCE = 0.02  # of the groups and gaps of a profile, compared with the clock
Figures = dict[str, Any]

TUNED_TRL = {"use_liger_kernel": True, **UNCHECKPOINTED}
TRL = Peer("liger", "torch_peers.py", "trl", TUNED_TRL)
UNSLOTH = Peer("unsloth", "unsloth_peer.py", "unsloth", UNCHECKPOINTED)
# About as many tokens per step as 32 alpaca rows.
LARGE_BATCH = {**GROUPED, "per_device_train_batch_size": 32}


@dataclass(frozen=True)
class Training:
    """Training of a Llama that our engines and peers are measured on.

    Args:
        task: Key of TASKS.
        shape: Fields of its configuration.
        length: Maximum row length in tokens.
        batch_size: Rows per micro-batch.
        method: `full`, `lora` or `qlora`.
        peers: Peers by title.
        accumulate: Micro-batches per step.
        rank: Rank of the adapters.
        warm_up: Steps before the first round.
        steps: Steps per round.
    """

    task: str
    shape: dict[str, int]
    length: int
    batch_size: int
    method: str
    peers: dict[str, Peer]
    accumulate: int = 1
    rank: int = 16
    warm_up: int = 6
    steps: int = 6

    @property
    def is_tied(self) -> bool:
        """True if the embedding is the output head, as in Llama-3.2-1B."""
        return self.method == "full"

    @property
    def num_parameters(self) -> int:
        """Number of parameters in matrices."""
        shape = self.shape
        per_layer = shape["hidden_size"] * (
            shape["head_dim"] * 2 * (shape["num_attention_heads"] + shape["num_key_value_heads"])
            + 3 * shape["intermediate_size"])
        embeddings = shape["vocab_size"] * shape["hidden_size"] * (1 if self.is_tied else 2)
        return shape["num_hidden_layers"] * per_layer + embeddings

    @property
    def flops(self) -> float:
        """FLOP per token without attention: 6 N for full fine-tuning, 4 N for adapters, as in published figures."""
        return (6 if self.method == "full" else 4) * self.num_parameters

    @property
    def attention_flops(self) -> float:
        """FLOP per token of queries times keys and weights times values, once forward and twice backward.

        Halved by the causal mask of full rows; not counted for short rows.
        """
        shape = self.shape
        return 0 if self.task == "sft" else (
            6 * shape["num_hidden_layers"] * shape["num_attention_heads"] * shape["head_dim"] * self.length)


ONE_B = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
         "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 128_256}
SEVEN_B = {"hidden_size": 4096, "intermediate_size": 11_008, "num_hidden_layers": 32, "num_attention_heads": 32,
           "num_key_value_heads": 32, "head_dim": 128, "vocab_size": 32_000}
EIGHT_B = {**SEVEN_B, "intermediate_size": 14_336, "num_key_value_heads": 8, "vocab_size": 128_256}
TRAININGS = {
    "clm": Training("clm", ONE_B, 4096, 4, "full", {"TRL + Liger": TRL}),
    "qlora": Training("sft", SEVEN_B, 512, 8, "qlora", {
        "TRL + Liger, grouped": replace(TRL, tuned={**TUNED_TRL, **LARGE_BATCH}),
        "TRL + Liger, packed": replace(TRL, tuned={**TUNED_TRL, "packing": True}),
        "Unsloth, grouped": replace(UNSLOTH, tuned={**UNCHECKPOINTED, **LARGE_BATCH})}, rank=64),
    "lora": Training("clm", EIGHT_B, 4096, 2, "lora", {
        "TRL + Liger": replace(TRL, tuned={**TUNED_TRL, "gradient_accumulation_steps": 8}),
        "Unsloth": replace(UNSLOTH, tuned={**UNCHECKPOINTED, "gradient_accumulation_steps": 8}),
        "NeMo Automodel": Peer("nemo", "nemo_peer.py", "nemo")}, accumulate=8, warm_up=2, steps=2)}
KINDS = [*TRAININGS, "rows", "sampling"]
SIDES = list(dict.fromkeys(["torch", "jax", *(name for training in TRAININGS.values() for name in training.peers)]))


@dataclass
class Sizes:
    """Sizes of everything."""

    device: str = "cuda"
    precision: str = "bf16-true"
    trainings: dict[str, Training] = field(default_factory=lambda: TRAININGS)
    matmul: int = 8192
    num_rows: int = 4000
    num_lines: int = 1500
    line_words: tuple[int, int] = (60, 900)
    row_layers: int = 4  # of `rows`, as the next two
    steps: int = 24
    batch_size: int = 4
    answer_tokens: int = 256


TOY = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
       "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 4096}


def shrink(training: Training) -> Training:
    """Return the training at a toy size, with peers as they run on a CPU, where Liger does not."""
    peers = {}
    for name, peer in training.peers.items():
        tuned = {key: value for key, value in peer.tuned.items() if key != "use_liger_kernel"}
        small = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}
        peers[name] = replace(peer, tuned=tuned | {key: value for key, value in small.items() if key in tuned})
    return replace(training, shape=TOY, length=64, batch_size=2, accumulate=min(training.accumulate, 2), rank=8,
                   warm_up=2, steps=2, peers=peers)


SMOKE = Sizes("cpu", "bf16-true", {name: shrink(training) for name, training in TRAININGS.items()}, 128, 60, 60,
              (5, 20), 1, 12, 2, 16)


# What runs in a process of its own: (sizes, folder, engine or training) -> figures -----------------------------------


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


def write_training(sizes: Sizes, folder: Path, name: str) -> Figures:
    """Write model/, with random weights created on the device, the data, recipe.yaml, rows.jsonl and check.json."""
    import torch
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    training, folder = sizes.trainings[name], folder / name
    tokenizer = AutoTokenizer.from_pretrained(TOKENIZER)
    special = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device(sizes.device):
        model = LlamaForCausalLM(LlamaConfig(**training.shape, **special, max_position_embeddings=4096,
                                             tie_word_embeddings=training.is_tied, dtype="bfloat16"))
    if training.method == "qlora":
        save_as_nf4(model, folder / "model")
    else:
        model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    recipe = make_recipe(sizes, training, folder)
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    fields = recipe["data"]["init_args"] | {"packing": False}
    Work(training.task, "", training.length).write_rows(folder, fields)
    return {"gib": sum(path.stat().st_size for path in (folder / "model").glob("*.safetensors")) / 2**30}


def save_as_nf4(model: Any, folder: Path) -> None:
    """Save a Llama with its layers in nf4, with double quantisation, as bitsandbytes saves them."""
    import torch
    from bitsandbytes.nn import Linear4bit, Params4bit
    from safetensors.torch import save_file
    from transformers import BitsAndBytesConfig

    for parent in [module for name, module in model.named_modules() if name.endswith(("self_attn", "mlp"))]:
        for name, linear in parent.named_children():
            if isinstance(linear, torch.nn.Linear):
                packed = Linear4bit(linear.in_features, linear.out_features, bias=False, device="meta",
                                    compute_dtype=torch.bfloat16, quant_type="nf4")
                packed.weight = Params4bit(linear.weight.data, requires_grad=False, quant_type="nf4")
                setattr(parent, name, packed.to(linear.weight.device))
    model.config.quantization_config = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16).to_dict()
    model.config.architectures = ["LlamaForCausalLM"]
    model.config.save_pretrained(folder)
    state = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})


def make_recipe(sizes: Sizes, training: Training, folder: Path) -> dict[str, Any]:
    """Return the recipe of our engines."""
    adapter = {} if training.method == "full" else {
        "lora": {"rank": training.rank, "alpha": 2 * training.rank, "targets": "all-linear"}}
    model = {"pretrained": str(folder / "model"), **adapter, "optimizer": {"lr": 1e-4, "schedule": "constant"}}
    if training.method == "qlora":
        model["quantize"] = "nf4"
    else:
        model["compile"] = sizes.device == "cuda"
    data = write_instruction_rows(sizes, folder) if training.task == "sft" else write_text_rows(sizes, folder)
    class_path, data_class_path = TASKS[training.task]
    return {
        "seed_everything": 1,
        "trainer": {**common_trainer_fields(sizes), "max_steps": 100_000,
                    "accumulate_grad_batches": training.accumulate},
        "model": {"class_path": class_path, "init_args": model},
        "data": {"class_path": data_class_path, "init_args": {
            **data, "max_length": training.length, "batch_size": training.batch_size,
            "cache_dir": str(folder / "cache")}}}


def common_trainer_fields(sizes: Sizes) -> dict[str, Any]:
    return {"accelerator": "cpu" if sizes.device == "cpu" else "gpu", "devices": 1, "precision": sizes.precision,
            "num_sanity_val_steps": 0, "limit_val_batches": 0, "log_every_n_steps": LOG_EVERY,
            "enable_checkpointing": False, "enable_progress_bar": False}


def compare_rows(sizes: Sizes, folder: Path, engine: str) -> Figures:
    """Measure the isolation of packed documents, and the speed of padded, packed, full and repeated batches."""
    model, length = {"config": row_config(sizes)}, sizes.trainings["clm"].length
    variants = {"padded": {"join": False, "pad_to_multiple_of": length},
                "packed": {"join": None, "packing": True}, "full": {}, "repeated": {}}
    figures = (torch_leakage if engine == "torch" else jax_leakage)(sizes)
    for variant, options in variants.items():
        if variant == "repeated":
            repeat_first_batch()
        data = {**write_text_rows(sizes, folder), "tokenizer": TOKENIZER, "max_length": length,
                "batch_size": sizes.batch_size, **options}
        figures[variant] = run_fit(sizes, folder, engine, f"rows-{variant}", model, data)
    return figures


def measure_sampling(sizes: Sizes, folder: Path, side: str) -> Figures:
    """Measure the seconds in which an engine samples answers; `side` is torch, graphs or jax."""
    import torch
    from generation import Model, load_ours, write_model

    shape = sizes.trainings["clm"].shape
    model, folder = Model({"model_type": "llama", **shape, "tie_word_embeddings": True}, None, sizes.precision), (
        folder / f"sampling-{side}")
    write_model(model, folder)
    answers = load_ours(model, folder, sizes.answer_tokens, "jax" if side == "jax" else "torch", sizes.device,
                        side == "graphs")
    prompts = torch.randint(5, 4000, (8, 64), generator=torch.Generator().manual_seed(1))
    seconds = []
    for _ in range(1 + ROUNDS):  # the first compiles
        start = time.perf_counter()
        num_tokens = sum(map(len, answers(prompts, True)))
        seconds.append(time.perf_counter() - start)
    return {"seconds": statistics.median(seconds[1:]), "tokens": num_tokens}


# Helpers ------------------------------------------------------------------------------------------------------------


def row_config(sizes: Sizes) -> dict[str, Any]:
    """Return the configuration of `rows`: a few layers of the 1B shape."""
    training = sizes.trainings["clm"]
    return {"model_type": "llama", **training.shape, "num_hidden_layers": sizes.row_layers,
            "max_position_embeddings": training.length, "tie_word_embeddings": True}


def run_fit(sizes: Sizes, folder: Path, engine: str, name: str, model: dict, data: dict) -> float:
    """Run a causal LM recipe in this process and return the median of real tokens per second."""
    from lmmods.cli import main

    out = folder / f"{name}-{engine}"
    recipe = {
        "engine": engine, "seed_everything": 1,
        "trainer": {**common_trainer_fields(sizes), "max_steps": sizes.steps, "default_root_dir": str(out)},
        "model": {"class_path": "CLM", "init_args": {**model, "optimizer": {"lr": 1e-4, "schedule": "constant"}}},
        "data": {"class_path": "CLMData", "init_args": data},
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
    return {"source": str(path), "documents": "line", "join": True}


def write_instruction_rows(sizes: Sizes, folder: Path) -> dict[str, Any]:
    """Write instructions with lengths like alpaca's, and return the data fields for packed rows."""
    path = folder / "rows.source.jsonl"
    write_instructions(path, sizes.num_rows)
    return {"source": str(path), "template": "alpaca", "packing": True}


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
    length = sizes.trainings["clm"].length
    quarter, half = length // 4, length // 2
    positions = [*range(quarter), *range(half), *range(length - quarter - half)]
    return [rng.randrange(10, 500) for _ in positions], slice(quarter, quarter + half), positions


def torch_leakage(sizes: Sizes) -> Figures:
    """Return the difference of a document's bf16 logits when packed, relative to the largest logit.

    `leak` is with isolated documents, `joined` without isolation.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from lmmods.torch_engine.nn.attention import prefer_varlen

    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**row_config(sizes))).to(sizes.device, torch.bfloat16).eval()
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

    network = hub.network(load_config(row_config(sizes)), "causal", compute_dtype="bfloat16")
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


# The program ----------------------------------------------------------------------------------------------------------


def run_part(name: str, folder: Path, smoke: bool, seconds: float) -> Figures:
    """Run a part in its own process and return its figures, or `error`."""
    log = folder / f"{name}.log"
    environment = {**os.environ, "LMMODS_CACHE": str(folder / "cache"),
                   "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, __file__, "--part", name, "--folder", str(folder), *["--smoke"] * smoke]
    with log.open("w") as file:
        try:
            subprocess.run(command, stdout=file, stderr=subprocess.STDOUT, env=environment, timeout=seconds, check=True)
            return json.loads((folder / f"{name}.json").read_text())
        except subprocess.TimeoutExpired:
            return {"error": f"stopped after {seconds:.0f} s"}
        except subprocess.CalledProcessError:
            return {"error": last_line(log.read_text())}


def last_line(text: str) -> str:
    """Return the last line, at most 150 characters, for a cell of a table."""
    return (text.strip().splitlines() or ["no output"])[-1][:150].replace("|", "/")


def run_side(sizes: Sizes, name: str, side: str, folder: Path, seconds: float) -> Figures:
    """Train with one of our engines or a peer, and return `speed`, `peak` and `loss`, or `error`."""
    training = sizes.trainings[name]
    settings = {"folder": str(folder / name), "task": training.task, "method": training.method, "rank": training.rank,
                "length": training.length, "batch_size": training.batch_size, "accumulate": training.accumulate,
                "warm_up": training.warm_up, "steps": training.steps, "device": sizes.device, "bf16": True}
    try:
        if side in ("torch", "jax"):
            worker = Side(sys.executable, "ours.py", {**settings, "engine": side}, seconds=seconds)
        else:
            peer = training.peers[side]
            # The toy sizes test this program, not the environments.
            python = sys.executable if sizes.device == "cpu" else make_environment(peer.environment)
            worker = Side(python, peer.program, {**settings, "peer": peer.peer, "tuned": peer.tuned}, seconds=seconds)
        [result] = run_sides([worker], ROUNDS)
    except (SystemExit, subprocess.CalledProcessError) as error:
        return {"error": last_line(str(error))}
    return {"speed": statistics.median(result.wall), "peak": result.peak, "loss": result.loss}


def profile_side(sizes: Sizes, name: str, engine: str, folder: Path, seconds: float) -> Figures:
    """Return the report of workers/profiled.py, or `error`, also if its groups do not add up to the time of a step."""
    training = sizes.trainings[name]
    try:
        run_worker("profiled.py", {
            "folder": str(folder / name), "engine": engine, "warm_up": training.warm_up, "steps": training.steps,
            "traced": TRACED, "options": [], "vocab_size": training.shape["vocab_size"],
            "rank": None if training.method == "full" else training.rank}, seconds)
    except (SystemExit, subprocess.TimeoutExpired) as error:
        return {"error": last_line(str(error))}
    report = json.loads((folder / name / f"{engine}.json").read_text())
    total = sum(report["parts"].values())
    if abs(total - report["traced"]) > SUM_TOLERANCE * report["traced"]:
        return {"error": f"groups and gaps make {total:.3f} s of {report['traced']:.3f} s"}
    return report | {"step": report["wall"] / training.steps}


def make_profile_table(reports: dict[str, Figures]) -> str:
    """Return milliseconds of a step by group, then the five largest operations in each `other`, and all errors."""
    profiles = {name: report for name, report in reports.items() if "error" not in report}

    def line(title: str, cell: Callable[[Figures], str]) -> str:
        return f"| {' | '.join([title, *map(cell, profiles.values())])} |"

    def group_cell(group: str) -> Callable[[Figures], str]:
        return lambda report: (f"{1000 * report['parts'][group] / TRACED:,.2f} "
                               f"({report['parts'][group] / sum(report['parts'].values()):.0%})")

    lines = [f"| ms of a step | {' | '.join(profiles)} |", f"|---|{'---:|' * len(profiles)}"]
    lines += [line("host (gaps)" if group == "host" else group, group_cell(group)) for group in GROUPS]
    lines += [line("sum", lambda report: f"{1000 * sum(report['parts'].values()) / TRACED:,.2f}"),
              line("step while profiled", lambda report: f"{1000 * report['traced'] / TRACED:,.2f}"),
              line("step", lambda report: f"{1000 * report['step']:,.2f}"), ""]
    for name, report in reports.items():
        largest = ", ".join(f"{operation[:80]} {1000 * seconds / TRACED:.2f} ms" for operation, seconds in
                            report.get("other", {}).items())
        lines.append(f"{name}: {report['error']}" if "error" in report else f"other in {name}: {largest or 'nothing'}")
    return "\n".join(lines)


def make_table(results: dict[tuple[str, str], Figures], sizes: Sizes, card: Figures) -> str:
    """Return the results by training and side as a Markdown table."""
    from lmmods.core.hardware import peak_flops

    nominal = peak_flops(card.get("device", "")) or math.nan
    lines = ["| training | side | tokens/s | our torch ÷ it | peak memory | our torch ÷ it | TFLOP/s | MFU "
             "| with attention | loss | note |", "|---|---|--:|--:|--:|--:|--:|--:|--:|--:|---|"]
    for (name, side), figures in results.items():
        training, ours = sizes.trainings[name], results.get((name, "torch"), {})
        title = f"{name}, {training.num_parameters / 1e9:.2f} B, {training.length} tokens"
        loss = ours.get("loss", figures.get("loss", math.nan))
        if "error" in figures or abs(figures["loss"] - loss) > LOSS_TOLERANCE["bf16-mixed"] * loss:
            note = figures.get("error") or f"another loss before training: {figures['loss']:.4f}, ours {loss:.4f}"
            lines.append(f"| {title} | {side} |{' |' * 8} {note} |")
            continue
        rate = figures["speed"] * training.flops
        whole = figures["speed"] * (training.flops + training.attention_flops)
        cells = [f"{figures['speed']:,.0f}", f"{ours.get('speed', math.nan) / figures['speed']:.2f}",
                 f"{figures['peak']:.1f} GiB", f"{ours.get('peak', math.nan) / figures['peak']:.2f}",
                 f"{rate / 1e12:,.0f}", f"{rate / nominal:.1%}", f"{whole / nominal:.1%}",
                 f"{figures['loss']:.4f}", ""]
        lines.append(f"| {title} | {side} | {' | '.join(cells)} |")
    return "\n".join(lines)


def make_row_table(results: dict[str, Figures], sizes: Sizes) -> str:
    """Return the comparison of rows as a Markdown table."""
    def line(title: str, cell: Callable[[Figures], str]) -> str:
        cells = [results.get(f"rows-{engine}", {"error": "not run"}) for engine in ("torch", "jax")]
        return f"| {' | '.join([title, *(figures.get('error') or cell(figures) for figures in cells)])} |"

    length = sizes.trainings["clm"].length
    return "\n".join([
        f"| four layers, rows of {length} | torch | jax |", "|---|---|---|",
        line("packed documents, leak / largest logit",
             lambda f: f"{f['leak']:.1e}, without isolation {f['joined']:.1e}"),
        line(f"padded to {length}", lambda f: f"{f['padded']:,.0f} tokens/s"),
        line("packed", lambda f: f"{f['packed']:,.0f} tokens/s, {f['packed'] / f['padded']:.1f} x"),
        line("full rows", lambda f: f"{f['full']:,.0f} tokens/s"),
        line("waiting for data, fraction of a step, compared with one repeated batch",
             lambda f: f"{1 - f['full'] / f['repeated']:.1%}")])


# Name of a part -> its function, its last argument, and the timeout in seconds.
PARTS: dict[str, tuple[Callable[[Sizes, Path, str], Figures], str, int]] = {
    "ceiling": (measure_ceiling, "torch", 60), **{f"write-{name}": (write_training, name, 240) for name in TRAININGS},
    "rows-torch": (compare_rows, "torch", 180), "rows-jax": (compare_rows, "jax", 240),
    **{f"sampling-{side}": (measure_sampling, side, 180) for side in ("torch", "graphs", "jax")}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=SIDES)
    parser.add_argument("--profile", action="store_true", help="profile the steps of our engines instead")
    parser.add_argument("--seconds", type=float, default=300,
                        help="maximum time of a side's warm-up, of each of its rounds, and of a profile")
    parser.add_argument("--smoke", action="store_true", help="toy sizes on the CPU")
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    sizes = SMOKE if args.smoke else Sizes()
    if args.part:
        part, argument, _ = PARTS[args.part]
        figures = part(sizes, args.folder, argument)
        (args.folder / f"{args.part}.json").write_text(json.dumps(figures))
        return
    results: dict[str, Figures] = {}
    sides: dict[tuple[str, str], Figures] = {}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)

        def run(name: str) -> Figures:
            results[name] = run_part(name, folder, args.smoke, PARTS[name][2])
            print(f"{name}: {results[name]}", flush=True)
            return results[name]

        if not args.profile:
            run("ceiling")
        for name in [name for name in TRAININGS if name in args.only]:
            names = [side for side in ("torch", "jax", *sizes.trainings[name].peers) if side in args.sides]
            (folder / name).mkdir()
            written = run(f"write-{name}")
            for side in [side for side in names if side in ("torch", "jax") or not args.profile]:
                measure = profile_side if args.profile else run_side
                sides[name, side] = written if "error" in written else measure(sizes, name, side, folder, args.seconds)
                print(f"{name}, {side}: {sides[name, side].get('error', 'done')}", flush=True)
            shutil.rmtree(folder / name)
        if "rows" in args.only and not args.profile:
            for engine in ("torch", "jax"):
                run(f"rows-{engine}")
        if "sampling" in args.only and not args.profile:
            for side in ("torch", "graphs", "jax"):
                run(f"sampling-{side}")
    if args.profile:
        print("", make_profile_table({", ".join(key): report for key, report in sides.items()}), sep="\n")
        return
    card = results["ceiling"]
    print("", card.get("device", card.get("error")), f"bf16 matrix product: {card.get('flops', math.nan) / 1e12:.0f} "
          "TFLOP/s", "", make_table(sides, sizes, card), sep="\n")
    if "rows" in args.only:
        print("", make_row_table(results, sizes), sep="\n")
    if "sampling" in args.only:
        print("", f"64 answers of {sizes.answer_tokens} tokens:", *(
            f"{name.removeprefix('sampling-')} {figures.get('error') or format(figures['seconds'], '.2f') + ' s'}"
            for name, figures in results.items() if name.startswith("sampling-")), sep="\n")


if __name__ == "__main__":
    main()
