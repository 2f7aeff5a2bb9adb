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
# `svd` work on the updates themselves, the others on the two factors of each, apart.
Method = Literal["cat", "svd", "linear", "ties", "dare_linear", "dare_ties"]
EQUAL_RANKS = ("linear", "ties", "dare_linear", "dare_ties")
PREFIX = "base_model.model."  # of PEFT's names of layers
# Settings of an adapter of which PEFT combines nothing or something else.
NOT_COMBINED = ("modules_to_save", "trainable_token_indices", "target_parameters", "use_dora", "lora_bias")


@dataclass
class Combination:
    """How adapters are combined.

    Args:
        method: PEFT's `combination_type`.
        weights: Weight of each adapter; None is the mean.
        density: Fraction of the numbers that ties and dare keep.
        seed: Random seed of dare.
    """

    method: Method
    weights: list[float] | None
    density: float | None
    seed: int | None

    def check(self, count: int) -> None:
        """Raises UserError: an option is missing, of no use, or out of range."""
        weights = self.weights
        if weights is not None and (len(weights) != count or not all(map(math.isfinite, weights))):
            raise UserError(f"--weights {weights} must be {count} numbers, one for each run.")
        prunes, draws = "ties" in self.method or "dare" in self.method, "dare" in self.method
        if prunes and (self.density is None or not 0 < self.density <= 1):
            raise UserError(f"--combination {self.method} needs --density, the fraction of numbers to keep. Set it "
                            "above 0, at most 1.")
        if not prunes and self.density is not None:
            raise UserError(f"--density applies only to ties and dare, but --combination is {self.method}. Remove it.")
        if not draws and self.seed is not None:
            raise UserError(f"--seed applies only to dare, but --combination is {self.method}. Remove it.")


def read_runs(names: list[str]) -> list[FinishedRun]:
    """Read the runs to combine. Raises UserError: one has no plain LoRA adapter, or another base or tokenizer."""
    runs = [FinishedRun.read(name, "merge", list(declared("model"))) for name in names]
    if not runs:
        raise UserError("--run is empty. Set a run folder.")
    first = runs[0]
    for run in runs:
        if not run.has_adapter:
            raise UserError(f"{run.option}: {run.folder.model} is a whole model, but only adapters can be combined.")
        if run.auto_class != first.auto_class:
            raise UserError(f"{run.option} is a run of {run.task}, but {first.folder.root} is a run of {first.task} "
                            "with other layers. Combine runs of one task.")
        for field in ("pretrained", "revision", "config_overrides", "quantize", "double_quant"):
            if (mine := getattr(run, field)) != (other := getattr(first, field)):
                raise UserError(f"{run.option}: model.{field} is {mine}, but {first.folder.root} has {other}. "
                                "Combine adapters of the same base.")
        if run.tokenizer().get_vocab() != first.tokenizer().get_vocab():
            raise UserError(f"{run.option}: its tokenizer has other tokens than the one in {first.folder.root}.")
        settings = adapter_config(run.folder.model, run.option)
        if settings["peft_type"] != "LORA":
            raise UserError(f"{run.option}: its adapter has peft_type {settings['peft_type']}, not LORA.")
        if held := next((name for name in NOT_COMBINED if settings.get(name)), None):
            raise UserError(f"{run.option}: its adapter has {held}, which PEFT cannot combine. Merge this run "
                            "separately.")
        if settings.get("bias", "none") != "none":
            raise UserError(f"{run.option}: its adapter trains biases, which PEFT cannot combine. Merge it separately.")
    return runs


def combine(runs: list[FinishedRun], combination: Combination, root: Path) -> FinishedRun:
    """Write the combined adapter as the model/ of a run folder, otherwise the first run's, and return that run.

    Args:
        root: Folder to make.

    Raises:
        UserError: The method does not suit the adapters, or one does not fit the base.
    """
    import torch

    from lmmods.torch_engine.compat.peft import lora_layers
    from lmmods.torch_engine.nn.lora import load_adapter

    first, names = runs[0], ["default", *(f"run{number}" for number in range(1, len(runs)))]
    model = load_adapter(first.load(None), first.folder.model, first.option)
    for name, run in zip(names[1:], runs[1:]):
        with fitting_adapter(run.folder.model, run.option):
            model.load_adapter(str(run.folder.model), name)
    layers = {name.removeprefix(PREFIX): layer for name, layer in lora_layers(model)}
    adds_factors = combination.method in EQUAL_RANKS
    for layer_name, layer in layers.items() if adds_factors else ():
        ranks = {run.folder.root: layer.r[name] for name, run in zip(names, runs) if name in layer.r}
        if len(set(ranks.values())) > 1:
            found = ", ".join(f"{rank} in {folder}" for folder, rank in ranks.items())
            raise UserError(f"--combination {combination.method} adds the factors of the adapters, which needs equal "
                            f"ranks, but {layer_name} has rank {found}. Use cat or svd.")
    # PEFT compares the largest ranks of the adapters instead, and gives the new one the settings of the first, but the
    # alpha with which one without rsLoRA is not scaled.
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
    # Sums of factors keep the rank of their layer, which PEFT's settings do not say. They are not scaled either.
    settings = model.peft_config["combined"]
    ranks = {name: _rank(layer, "combined") for name, layer in layers.items() if "combined" in layer.r}
    settings.rank_pattern = {name: rank for name, rank in ranks.items() if rank != settings.r}
    settings.alpha_pattern = settings.rank_pattern
    exported = fresh_folder(root) / "model"
    others = shutil.ignore_patterns(SETTINGS, WEIGHTS, "README.md", "*.png", EVAL_RESULTS)
    shutil.copytree(first.folder.model, exported, ignore=others)
    for file in (first.folder.config, first.folder.data_report):
        shutil.copyfile(file, root / file.name)
    written = exported / "combined"
    model.save_pretrained(exported, selected_adapters=["combined"])
    for name in (SETTINGS, WEIGHTS):
        (written / name).rename(exported / name)
    shutil.rmtree(written)
    return replace(first, folder=RunFolder(str(root)))


def _rank(layer: Any, adapter: str) -> int:
    """Return the rank of an adapter's factors in a LoRA layer."""
    factor = layer.lora_A[adapter].weight if adapter in layer.lora_A else layer.lora_embedding_A[adapter]
    return factor.shape[0]
