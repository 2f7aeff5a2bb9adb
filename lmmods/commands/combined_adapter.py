"""Combine the adapters of several runs into one, by PEFT's `add_weighted_adapter`."""

import math
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from lmmods.commands.exported_model import FinishedRun
from lmmods.core.adapters import SETTINGS, WEIGHTS, adapter_config, fitting_adapter
from lmmods.core.errors import UserError
from lmmods.runs.eval_results import FOLDER as EVAL_RESULTS
from lmmods.runs.folder import RunFolder
from lmmods.runs.inside import fresh_folder

# Methods of Yadav et al. 2023 ("TIES-Merging") and Yu et al. 2023 ("Language Models are Super Mario", DARE). `cat` and
# `svd` work on the updates themselves, the others on the two factors of each, apart.
Method = Literal["cat", "svd", "linear", "ties", "dare_linear", "dare_ties"]
EQUAL_RANKS = ("linear", "ties", "dare_linear", "dare_ties")
# Settings of an adapter of which PEFT combines nothing or something else.
NOT_COMBINED = ("modules_to_save", "trainable_token_indices", "target_parameters", "use_dora", "lora_bias")


@dataclass
class Combination:
    """How adapters are combined.

    Args:
        method: PEFT's `combination_type`.
        weights: Of the adapters, in their order; None is the mean.
        density: Share of the numbers that ties and dare keep.
        seed: Of the numbers that dare drops.
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
            raise UserError(f"--combination {self.method} needs --density, the share of the numbers to keep: above 0, "
                            "at most 1.")
        if not prunes and self.density is not None:
            raise UserError(f"--density is of ties and dare alone, and --combination is {self.method}. Leave it out.")
        if not draws and self.seed is not None:
            raise UserError(f"--seed is of dare alone, and --combination is {self.method}. Leave it out.")


def read_runs(names: list[str]) -> list[FinishedRun]:
    """Read the runs to combine. Raises UserError: one has no plain LoRA adapter, or another base or tokenizer."""
    runs = [FinishedRun.read(name, "merge") for name in names]
    if not runs:
        raise UserError("--run names no run.")
    first = runs[0]
    for run in runs:
        if not run.has_adapter:
            raise UserError(f"{run.option}: {run.folder.model} is a whole model, and adapters alone are combined.")
        for field in ("pretrained", "revision", "config_overrides", "quantize", "double_quant"):
            if (mine := getattr(run, field)) != (other := getattr(first, field)):
                raise UserError(f"{run.option}: model.{field} is {mine}, and of {first.folder.root} it is {other}. "
                                "Adapters are combined if they are of the same base.")
        if run.tokenizer().get_vocab() != first.tokenizer().get_vocab():
            raise UserError(f"{run.option}: its tokenizer has other tokens than that of {first.folder.root}.")
        settings = adapter_config(run.folder.model, run.option)
        if settings["peft_type"] != "LORA":
            raise UserError(f"{run.option}: its adapter is of peft_type {settings['peft_type']}, not LORA.")
        if held := next((name for name in NOT_COMBINED if settings.get(name)), None):
            raise UserError(f"{run.option}: its adapter has {held}, which PEFT does not combine. Merge this run by "
                            "itself.")
        if settings.get("bias", "none") != "none":
            raise UserError(f"{run.option}: its adapter trains biases, which PEFT does not combine.")
    return runs


def combine(runs: list[FinishedRun], combination: Combination, root: Path) -> FinishedRun:
    """Write the combined adapter as the model/ of a run folder, otherwise the first run's, and return that run.

    Args:
        root: Folder to make.

    Raises:
        UserError: The method does not suit the adapters, or one does not fit the base.
    """
    import torch

    from lmmods.torch_engine.nn.lora import load_adapter

    first, names = runs[0], ["default", *(f"run{number}" for number in range(1, len(runs)))]
    if combination.method in EQUAL_RANKS:
        ranks = [_rank(run) for run in runs]
        if len(set(ranks)) > 1:
            raise UserError(f"--combination {combination.method} takes adapters of one rank, and these have "
                            f"{', '.join(map(str, ranks))}. Choose cat or svd.")
    model = load_adapter(first.load(None), first.folder.model, first.option)
    for name, run in zip(names[1:], runs[1:]):
        with fitting_adapter(run.folder.model, run.option):
            model.load_adapter(str(run.folder.model), name)
    # PEFT gives the new adapter the settings of the first, and the alpha with which one without rsLoRA is not scaled.
    model.peft_config["default"] = replace(model.peft_config["default"], use_rslora=False, init_lora_weights=True)
    torch.manual_seed(combination.seed or 0)
    with fitting_adapter(first.folder.model, f"--combination {combination.method}"):
        model.add_weighted_adapter(names, combination.weights or [1 / len(runs)] * len(runs), "combined",
                                   combination.method, density=combination.density)
    exported = fresh_folder(root) / "model"
    others = shutil.ignore_patterns(SETTINGS, WEIGHTS, "README.md", "*.png", EVAL_RESULTS)
    shutil.copytree(first.folder.model, exported, ignore=others)
    shutil.copyfile(first.folder.config, root / first.folder.config.name)
    written = exported / "combined"
    model.save_pretrained(exported, selected_adapters=["combined"])
    for name in (SETTINGS, WEIGHTS):
        (written / name).rename(exported / name)
    shutil.rmtree(written)
    return replace(first, folder=RunFolder(str(root)))


def _rank(run: FinishedRun) -> int:
    settings: dict[str, Any] = adapter_config(run.folder.model, run.option)
    return max(settings["r"], *(settings.get("rank_pattern") or {}).values(), 0)
