"""Combine the adapters of several runs into one, by PEFT's `add_weighted_adapter`."""

import math
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from lmmods.commands.exported_model import FinishedRun
from lmmods.core.adapters import SETTINGS, WEIGHTS, adapter_config, fitting_adapter
from lmmods.core.errors import UserError, first_line
from lmmods.recipe.classes import declared
from lmmods.runs.eval_results import FOLDER as EVAL_RESULTS
from lmmods.runs.folder import RunFolder
from lmmods.runs.run_files import fresh_folder

# Methods of Yadav et al. 2023 ("TIES-Merging") and Yu et al. 2023 ("Language Models are Super Mario", DARE). `cat` and
# `svd` combine the updates, the others the two factors of each update separately.
Method = Literal["cat", "svd", "linear", "ties", "dare_linear", "dare_ties"]
FACTOR_METHODS = ("linear", "ties", "dare_linear", "dare_ties")
PREFIX = "base_model.model."  # of PEFT's layer names
# Settings of an adapter that PEFT does not combine, or combines incorrectly.
NOT_COMBINED = ("modules_to_save", "trainable_token_indices", "target_parameters", "use_dora", "lora_bias")


@dataclass
class Combination:
    """How adapters are combined.

    Args:
        method: PEFT's `combination_type`.
        weights: Weight of each adapter; None is the mean.
        density: Fraction of the values that ties and dare keep.
        seed: Random seed of dare.
    """

    method: Method
    weights: list[float] | None
    density: float | None
    seed: int | None

    def check(self, count: int) -> None:
        """Raise UserError if an option is missing, unused or out of range."""
        weights = self.weights
        if weights is not None and (len(weights) != count or not all(map(math.isfinite, weights))):
            raise UserError(f"--weights is {weights}, but must be {count} numbers, one per run.")
        prunes, is_random = "ties" in self.method or "dare" in self.method, "dare" in self.method
        if prunes and (self.density is None or not 0 < self.density <= 1):
            raise UserError(f"--combination {self.method} needs --density, the fraction of values to keep. Set it "
                            "above 0, at most 1.")
        if not prunes and self.density is not None:
            raise UserError(f"--density applies only to ties and dare, but --combination is {self.method}. Remove it.")
        if not is_random and self.seed is not None:
            raise UserError(f"--seed applies only to dare, but --combination is {self.method}. Remove it.")


def read_runs(names: list[str]) -> list[FinishedRun]:
    """Read the runs to combine. Raises UserError: they lack plain LoRA adapters with the same base and tokenizer."""
    runs = [FinishedRun.read(name, "merge", list(declared("model"))) for name in names]
    if not runs:
        raise UserError("--run is empty. Set a run folder.")
    first = runs[0]
    for run in runs:
        if not run.has_adapter:
            raise UserError(f"{run.option}: {run.folder.model} is a whole model, but only adapters can be combined. "
                            "Remove this run.")
        if run.auto_class != first.auto_class:
            raise UserError(f"{run.option}: its task is {run.task}, but {first.folder.root} has {first.task}, with "
                            "other layers. Combine runs of one task.")
        for field in ("pretrained", "revision", "config_overrides", "quantize", "double_quant"):
            if (value := getattr(run, field)) != (other := getattr(first, field)):
                raise UserError(f"{run.option}: model.{field} is {value}, but {first.folder.root} has {other}. "
                                "Combine adapters of the same base.")
        if run.tokenizer().get_vocab() != first.tokenizer().get_vocab():
            raise UserError(f"{run.option}: its tokenizer has other tokens than the one in {first.folder.root}. "
                            "Combine runs with the same tokenizer.")
        settings = adapter_config(run.folder.model, run.option)
        if settings["peft_type"] != "LORA":
            raise UserError(f"{run.option}: its adapter has peft_type {settings['peft_type']}, not LORA. Remove this "
                            "run.")
        if setting_name := next((name for name in NOT_COMBINED if settings.get(name)), None):
            raise UserError(f"{run.option}: its adapter has {setting_name}, which PEFT cannot combine. Merge this run "
                            "separately.")
        if settings.get("bias", "none") != "none":
            raise UserError(f"{run.option}: its adapter trains biases, which PEFT cannot combine. Merge it separately.")
    return runs


def combine(runs: list[FinishedRun], combination: Combination, root: Path) -> FinishedRun:
    """Write a run folder with the combined adapter in model/ and all other files of the first run; return that run.

    Args:
        root: Folder to create.

    Raises:
        UserError: The method does not work with these adapters, or an adapter does not fit the base.
    """
    import torch

    from lmmods.torch_engine.compat.peft import lora_layers
    from lmmods.torch_engine.nn.lora import load_adapter

    first, names = runs[0], ["default", *(f"run{index}" for index in range(1, len(runs)))]
    model = load_adapter(first.load(None), first.folder.model, first.option)
    for name, run in zip(names[1:], runs[1:]):
        with fitting_adapter(run.folder.model, run.option):
            model.load_adapter(str(run.folder.model), name)
    layers = {name.removeprefix(PREFIX): layer for name, layer in lora_layers(model)}
    adds_factors = combination.method in FACTOR_METHODS
    for layer_name, layer in layers.items() if adds_factors else ():
        ranks = {run.folder.root: layer.r[name] for name, run in zip(names, runs) if name in layer.r}
        if len(set(ranks.values())) > 1:
            rank_list = ", ".join(f"{rank} in {folder}" for folder, rank in ranks.items())
            raise UserError(f"--combination {combination.method} adds the factors of the adapters, which needs equal "
                            f"ranks, but {layer_name} has rank {rank_list}. Use cat or svd.")
    # PEFT compares the maximum ranks of the adapters. The new adapter gets the settings of the first one, but an alpha
    # that does not scale it, without rsLoRA.
    largest = [max(layer.r[name] for layer in layers.values() if name in layer.r) for name in names]
    for name, rank in zip(names, [max(largest)] * len(names) if adds_factors else largest):
        model.peft_config[name] = replace(model.peft_config[name], r=rank, rank_pattern={}, use_rslora=False,
                                          init_lora_weights=True)
    torch.manual_seed(combination.seed or 0)
    try:
        model.add_weighted_adapter(names, combination.weights or [1 / len(runs)] * len(runs), "combined",
                                   combination.method, density=combination.density)
    except (TypeError, ValueError) as error:
        raise UserError(f"--combination {combination.method}: PEFT cannot combine these adapters "
                        f"({first_line(error)}). Merge each run separately.") from error
    # Layers keep their own ranks, which PEFT does not write to the settings. Alpha is the rank: nothing is scaled.
    settings = model.peft_config["combined"]
    ranks = {name: _rank(layer, "combined") for name, layer in layers.items() if "combined" in layer.r}
    settings.rank_pattern = {name: rank for name, rank in ranks.items() if rank != settings.r}
    settings.alpha_pattern = settings.rank_pattern
    exported = fresh_folder(root) / "model"
    others = shutil.ignore_patterns(SETTINGS, WEIGHTS, "README.md", "*.png", EVAL_RESULTS)
    shutil.copytree(first.folder.model, exported, ignore=others)
    for file in (first.folder.config, first.folder.data_report):
        shutil.copyfile(file, root / file.name)
    subfolder = exported / "combined"
    model.save_pretrained(exported, selected_adapters=["combined"])
    for name in (SETTINGS, WEIGHTS):
        (subfolder / name).rename(exported / name)
    shutil.rmtree(subfolder)
    return replace(first, folder=RunFolder(str(root)))


def _rank(layer: Any, adapter: str) -> int:
    """Return the rank of an adapter's factors in a LoRA layer."""
    factor = layer.lora_A[adapter].weight if adapter in layer.lora_A else layer.lora_embedding_A[adapter]
    return factor.shape[0]
