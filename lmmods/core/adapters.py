"""LoRA adapters on both engines: which modules carry one, which train in full beside it, and what a folder holds."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from lmmods.core.errors import UserError
from lmmods.core.settings import LoRA

SETTINGS = "adapter_config.json"


def adapted_layers(lora: LoRA, linear: Iterable[str]) -> set[str]:
    """Names of the layers that carry an adapter; a target names the modules whose name ends in it, as in PEFT.

    Args:
        linear: Names of all layers that can: linear ones, quantised or not, without the output head.

    Raises:
        UserError: A target matches none of them.
    """
    linear = list(linear)
    targets = [lora.targets] if isinstance(lora.targets, str) else lora.targets
    return set(linear) if "all-linear" in targets else _matching("lora.targets", targets, linear, linear)


def modules_in_full(lora: LoRA, modules: Iterable[str], linear: Iterable[str]) -> set[str]:
    """Names of the modules that `modules_to_save` names. Raises UserError: one matches none of them."""
    return _matching("lora.modules_to_save", lora.modules_to_save or [], list(modules), linear)


def quantised_in_full(module: str, kind: str) -> str:
    """What to say where `modules_to_save` names a module whose weight is quantised."""
    return (f"lora.modules_to_save: {module} is stored in {kind}, so it cannot be trained in full. Name it in "
            "lora.targets instead, or set model.quantize to null.")


def adapter_config(folder: str | Path) -> dict[str, Any]:
    """Settings in a PEFT folder. Raises UserError where there are none."""
    try:
        return json.loads((Path(folder) / SETTINGS).read_text())
    except FileNotFoundError as error:
        raise UserError(f"model.adapter: {folder} holds no {SETTINGS}. Name a folder written by PEFT's "
                        "save_pretrained, for example runs/NAME/model.") from error


def _matching(key: str, wanted: list[str], present: list[str], linear: Iterable[str]) -> set[str]:
    found = set()
    for target in wanted:
        hits = {name for name in present if f".{name}".endswith(f".{target}")}
        if not hits:
            candidates = sorted({name.rsplit(".", 1)[-1] for name in linear})
            raise UserError(f"{key}: {target!r} matches no module of this model. Candidates: {', '.join(candidates)}.")
        found |= hits
    return found
