"""Random recipes, each trained with two batch splits on torch and with one of them on JAX: the same losses.

LMMODS_TRIALS sets the number of trials. The seed of a trial is its number.
"""

import json
import os
import random
from pathlib import Path

import pytest
import torch
import transformers
import yaml
from transformers import AutoTokenizer

from lmmods.cli import main
from lmmods.core.preference_losses import METHODS
from lmmods.runs.folder import RunFolder
from tests.data.test_mlm import bert_folder  # noqa: F401 - a fixture
from tests.finished_runs import TIMED, rows
from tests.jax_engine.hf_reference import AUTO, FAMILIES
from tests.jax_engine.tested import CAUSAL, ENCODERS

NUM_TRIALS = int(os.environ.get("LMMODS_TRIALS", "16"))
NUM_QUICK = 2
HEADS = {"SFT": "causal", "CLM": "causal", "Preference": "causal", "MLM": "masked", "QA": "qa"}
ROWS = 8  # per step
SPLITS = [(8, 1), (4, 2), (2, 4), (1, 8)]  # rows per micro-batch, micro-batches per step
LENGTH = 48
# All but sgd take full steps even where a gradient is only rounding. At three times these rates, the losses of one
# program with two torch kernels differed by 1.5e-5 after six steps, and ipo's gradient norms by 8e-3.
RATES = {"adamw": 0.001, "sgd": 0.01, "adafactor": 0.0005, "lion": 0.0001}
UNPACKED = ("openai-gpt", "ctrl", "gpt_oss", "qwen3_5_text")  # torch may reject packed rows for these
WORDS = "the quick brown fox jumps over a lazy dog and then it sleeps".split()


def sample_trial(seed: int) -> dict:
    """Sample a trial: `model` and `data` as in a recipe, and the other choices by name."""
    rng = random.Random(seed)
    in_half, in_quarter = (lambda fraction=fraction: rng.random() < fraction for fraction in (0.5, 0.25))
    task = rng.choice([*HEADS, "SFT", "Preference"])
    optimizer = rng.choice([*RATES])
    adapter = rng.random() < 0.6
    model = {"optimizer": {"name": optimizer, "lr": RATES[optimizer],
                           "schedule": rng.choice(["constant", "linear", "cosine"]), "warmup": rng.choice([0, 2]),
                           "weight_decay": rng.choice([0.0, 0.1])},
             "gradient_checkpointing": in_quarter(), "fast_kernels": not in_quarter()}
    if adapter:
        model["lora"] = {"rank": rng.choice([2, 5]), "alpha": 8, "dropout": rng.choice([0.0, 0.1, 0.3]),
                         "dora": in_quarter(), "rslora": in_quarter()}
        model["quantize"] = rng.choice([None, "nf4", "fp4", "int8"])
        model["double_quant"] = in_half()
    data = {"group_by_length": in_half(), "shuffle": not in_quarter()}
    if task == "Preference":
        name = rng.choice([*METHODS])
        method = METHODS[name]
        model |= {"loss": name, "beta": rng.choice([0.05, 0.1, 0.5])}
        if method.smooths:
            model["label_smoothing"] = 0.1 if name == "exo_pair" or in_quarter() else 0.0
        if method.is_paired:
            model["sft_weight"] = rng.choice([None, 0.2])
        else:
            model["undesirable_weight"] = rng.choice([1.0, 0.3])
        if method.has_reference:
            model["reference"] = rng.choice([None, "copy", "cache"])
    elif task in ("SFT", "CLM") and in_quarter():
        data = {"packing": True}
    elif task == "CLM":
        data["join"] = in_half()
    elif task == "MLM":
        data |= {"join": in_half(), "whole_word_masking": in_half(), "mlm_probability": 0.3}
    family = rng.choice(CAUSAL if HEADS[task] == "causal" else ENCODERS)
    if family in UNPACKED:
        data.pop("packing", None)
    trial = {"task": task, "family": family, "model": model,
            "data": data, "seed_everything": seed, "dropout": rng.choice([0.0, 0.1]), "weights": in_half(),
            "gradient_clip_val": rng.choice([None, 0.5]), "splits": rng.sample(SPLITS, 2), "on_jax": in_quarter(),
            "piece_tokens": rng.choice([None, 60])}
    if optimizer == "sgd":  # its steps scale with the gradients, which are huge for random weights
        trial["gradient_clip_val"] = 0.5
    return trial


@pytest.fixture(scope="module")
def material(tmp_path_factory, tokenizer_folder, bert_folder):  # noqa: F811
    """Return two functions: one for the model folder of a family and head, one for a file with rows of a task."""
    root = tmp_path_factory.mktemp("material")

    def model_folder(family: str, head: str) -> Path:
        folder = root / f"{family}-{head}"
        if not folder.exists():
            tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder if head == "causal" else bert_folder)
            fields = FAMILIES[family] | {"vocab_size": len(tokenizer), "initializer_range": 0.2}
            if "vocab_size_per_layer_input" in fields:
                fields["vocab_size_per_layer_input"] = len(tokenizer)
            fields |= {name: 2 * LENGTH for name in ("max_position_embeddings", "n_positions") if name in fields}
            # One layer compiles fastest, and more test nothing new unless layer types differ.
            if "layer_types" not in fields:
                fields |= {name: 1 for name in ("num_hidden_layers", "n_layer", "n_layers") if fields.get(name, 0) > 2}
            if "num_hidden_groups" in fields:  # albert: each group needs at least one layer
                fields["num_hidden_groups"] = 1
            if "pad_token_id" in fields:
                fields["pad_token_id"] = 0
            torch.manual_seed(0)
            config = transformers.CONFIG_MAPPING[family](**fields)
            getattr(transformers, AUTO[head]).from_config(config).save_pretrained(folder)
            tokenizer.save_pretrained(folder)
        return folder

    def rows_file(task: str, single: bool, weights: bool) -> str:
        path = root / f"{task}-{single}-{weights}.jsonl"
        rng = random.Random(task)
        content = [make_row(task, single, rng) | ({"weight": rng.choice([0.5, 1, 2])} if weights else {})
                   for _ in range(44)]
        path.write_text("".join(json.dumps(row) + "\n" for row in content))
        return str(path)

    return model_folder, rows_file


def make_row(task: str, single: bool, rng: random.Random) -> dict:
    def text(max_words: int) -> str:
        return " ".join(rng.choice(WORDS) for _ in range(rng.randint(1, max_words)))

    if task in ("CLM", "MLM"):
        return {"text": text(40)}
    if task == "QA":
        context = text(30)
        answer = rng.choice(context.split())
        return {"id": str(rng.random()), "question": text(4), "context": context,
                "answers": {"text": [answer], "answer_start": [context.index(answer)]}}
    if task == "SFT":
        return {"prompt": text(5), "completion": text(6)}
    if single:
        return {"prompt": text(5), "completion": text(6), "label": rng.random() < 0.5}
    return {"prompt": text(5), "chosen": text(6), "rejected": text(6)}


def recipe_changes(trial: dict, material, engine: str, split: tuple[int, int], other: bool) -> dict:
    """Return the changes to the recipe of the fixture.

    Args:
        other: Whether this is the second torch run, with other padding, evaluation batches and chunks.
    """
    model_folder, rows_file = material
    task, model = trial["task"], dict(trial["model"])
    folder = model_folder(trial["family"], HEADS[task])
    config = transformers.AutoConfig.from_pretrained(folder)
    rates = [name for name, value in vars(config).items() if "drop" in name and isinstance(value, float)]
    model |= {"pretrained": str(folder), "config_overrides": dict.fromkeys(rates, trial["dropout"]) or None}
    if engine == "torch" and other:
        model["piece_tokens"] = trial["piece_tokens"]
    is_labelled = task == "Preference" and not METHODS[model["loss"]].is_paired
    has_weights = trial["weights"] and task in ("SFT", "Preference")
    data = {**trial["data"], "source": rows_file(task, is_labelled, has_weights), "val_size": 8, "max_length": LENGTH,
            "batch_size": split[0], "pad_to_multiple_of": 8 if other else LENGTH,
            "eval_batch_size": 3 if other else 8}
    if task in ("SFT", "Preference"):
        data["template"] = "plain"
    if task == "QA":
        data |= {"stride": 8, "question_max_length": 12}
    return {"engine": engine, "seed_everything": trial["seed_everything"],
            "model": {"class_path": task, "init_args": model}, "data": {"class_path": f"{task}Data", "init_args": data},
            "trainer__accumulate_grad_batches": split[1], "trainer__max_steps": 6, "trainer__val_check_interval": None,
            "trainer__gradient_clip_val": trial["gradient_clip_val"], "trainer__enable_checkpointing": False,
            "checkpoint": {"every_n_steps": None}}


def find_differences(actual: list[dict], expected: list[dict]) -> list[str]:
    """Return the differences of two runs as messages. Losses must agree to 1e-5, relative above 1, all else to 1e-3.

    Reward accuracy may also differ by half a row per step, as rounding can make or break a tie.
    """
    if [row.keys() for row in actual] != [row.keys() for row in expected]:
        return [f"other rows: {actual} and {expected}"]
    messages = []
    for row, expected_row in zip(actual, expected, strict=True):
        for name, value in expected_row.items():
            tolerance = 1e-5 if name.endswith("/loss") else 1e-3
            if name.endswith("/rewards/accuracy"):
                tolerance += 0.5 / ROWS
            if not abs(row[name] - value) <= tolerance * max(1, abs(value)):  # also catches NaN
                messages.append(f"step {expected_row['step']:g}: {name} is {row[name]} and {value}")
    return messages


@pytest.mark.parametrize("seed", [pytest.param(seed, marks=[] if seed < NUM_QUICK else pytest.mark.slow)
                                  for seed in range(NUM_TRIALS)])
def test_a_random_recipe_trains_equally_with_any_split_and_engine(recipe, material, tmp_path, monkeypatch, seed):
    monkeypatch.setenv("LMMODS_CACHE", str(tmp_path / "cache"))
    trial = sample_trial(seed)
    first_split, second_split = trial["splits"]
    runs = {"torch": ("torch", first_split, False), "torch, other split": ("torch", second_split, True),
            "jax": ("jax", second_split if trial["on_jax"] else first_split, False)}
    metrics = {}
    for name, (engine, split, is_other) in runs.items():
        run = RunFolder(tmp_path / name.replace(", ", "-").replace(" ", "-"))
        changes = recipe_changes(trial, material, engine, split, is_other)
        status = main(["fit", *recipe(f"{run.root.name}.yaml", **changes,
                                      trainer__default_root_dir=str(run.root))])
        assert status == 0, f"Trial {seed} ended with status {status} on {name}:\n{yaml.safe_dump(trial)}"
        metrics[name] = rows(run, without=TIMED)
    messages = [f"{name}, {line}" for name in runs for line in find_differences(metrics[name], metrics["torch"])]
    assert not messages, f"Trial {seed}:\n{yaml.safe_dump(trial)}" + "\n".join(messages)
