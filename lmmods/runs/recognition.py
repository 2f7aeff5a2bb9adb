"""Files of a run in a folder of an earlier version, which has no list of them: recognised by name and content."""

import glob
import json
import re
from pathlib import Path
from typing import Any

from lmmods.core.errors import UserError
from lmmods.core.files import is_plain_name, read_text
from lmmods.core.recipes import read_recipe
from lmmods.runs.checkpoint_files import holds_checkpoint

# At the top of a run folder: what any run writes, and what question answering writes beside it.
FILES = ("config.yaml", "data_report.json", "metrics.csv", "metrics.json", "samples.jsonl", "resumes.jsonl",
         "loss.png", "completed", "predictions.jsonl", "evaluate.json")
ANSWERS = ("predictions.json", "nbest_predictions.json", "null_odds.json")
# What exports write: models, adapters, tokenizers, card and curves.
EXPORTED = re.compile(
    r"(config|generation_config|adapter_config|tokenizer|tokenizer_config|special_tokens_map|added_tokens|vocab)\.json"
    r"|(model|adapter_model)(-\d+-of-\d+)?\.safetensors|model\.safetensors\.index\.json"
    r"|(vocab|merges)\.txt|(tokenizer|spiece|sentencepiece\.bpe)\.model|chat_template\.(jinja|json)|README\.md|loss\.png")


def recognised(root: Path) -> set[str]:
    """Paths of a run without that list, recognised by its recipe and checkpoints; none if there is no run."""
    recipe = _recipe(root)
    has_checkpoint = holds_checkpoint(root / "checkpoints")
    if not (recipe and (root / "data_report.json").is_file()) and not has_checkpoint:
        return set()
    task = recipe["model"].get("class_path", "") if recipe else ""
    found = {name for name in (*FILES, *(ANSWERS if task == "QA" else ())) if (root / name).is_file()}
    if has_checkpoint:
        found.add("checkpoints")
    found |= {name for name in (".model", ".publish") if (root / name).is_dir()}  # half written
    found |= {"manifest.json"} if _is_manifest(root / "manifest.json") else set()
    return found | _exported(root) | wandb_paths(recipe, root)


def wandb_id(recipe: dict[str, Any]) -> str | None:
    """Id under which W&B knows the run of a recipe."""
    return _wandb_options(recipe).get("id")


def _wandb_options(recipe: dict[str, Any]) -> dict[str, Any]:
    loggers = (recipe.get("trainer") or {}).get("logger")
    return next((logger.get("init_args") or {} for logger in (loggers if isinstance(loggers, list) else [loggers])
                 if isinstance(logger, dict) and str(logger.get("class_path")).endswith("WandbLogger")), {})


def wandb_paths(recipe: dict[str, Any], root: Path) -> set[str]:
    """What W&B writes into the run folder for the run of a recipe; `*` stands for the time of a start."""
    logger = _wandb_options(recipe)
    name = str(logger.get("id") or "")
    if not is_plain_name(name) or Path(logger.get("save_dir") or root).resolve() != root.resolve():
        return set()
    return {"wandb", f"wandb/*-{glob.escape(name)}", "wandb/latest-run", "wandb/debug.log", "wandb/debug-internal.log"}


def _is_manifest(path: Path) -> bool:
    """Whether a run wrote this file, and not the user one of the same name."""
    try:
        return {"starts", "end"} <= json.loads(read_text(path)).keys()
    except (OSError, ValueError, AttributeError, RecursionError):
        return False


def _recipe(root: Path) -> dict[str, Any]:
    """config.yaml, if a run wrote it."""
    try:
        recipe = read_recipe(root / "config.yaml")
    except UserError:
        return {}
    has_parts = all(isinstance(recipe.get(part), dict) and "init_args" in recipe[part] for part in ("model", "data"))
    return recipe if has_parts and isinstance(recipe.get("trainer"), dict) else {}


def _exported(root: Path) -> set[str]:
    """model/ and the files of an export in it, where its card is one of ours."""
    card = root / "model" / "README.md"
    try:
        is_ours = re.search(r"^- lmmods$", read_text(card).split("\n---")[0], re.M)
    except (OSError, ValueError):
        return set()
    return {"model", *(f"model/{path.name}" for path in card.parent.iterdir() if EXPORTED.fullmatch(path.name))
            } if is_ours else set()
