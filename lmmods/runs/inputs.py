"""Check that a run does not overwrite its own inputs."""

import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from lmmods.core.errors import UserError

KEYS = ("pretrained", "adapter", "tokenizer", "source", "val_source", "test_source", "predict_source")


def check_inputs(root: Path, names: Iterable[str], recipe: dict[str, Any]) -> None:
    """Refuse a recipe that reads what its run would replace.

    Args:
        names: What the run writes in it.

    Raises:
        UserError: A model, an adapter, a tokenizer or rows lie under one of these names.
    """
    written = {name: (root / name).resolve() for name in names}
    for key, path in _paths(recipe):
        if not os.path.lexists(path):
            continue
        for name, place in written.items():
            if path.resolve() == place or place in path.resolve().parents:
                raise UserError(f"{key} is {path}, but a run in {root} writes {name} itself. Choose another "
                                "trainer.default_root_dir, or move what is read out of this one.")


def _paths(recipe: dict[str, Any]) -> Iterator[tuple[str, Path]]:
    """Keys and the paths they name; of a glob pattern, the folder before its first wildcard."""
    for block in ("model", "data"):
        options = (recipe.get(block) or {}).get("init_args") or {}
        for key in KEYS:
            for text in _texts(options.get(key)):
                yield f"{block}.{key}", _before_pattern(text)
    for text in _texts((recipe.get("mmlu") or {}).get("source")):
        yield "mmlu.source", _before_pattern(text)


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for each in value:
            yield from _texts(each)
    elif isinstance(value, dict):
        yield from _texts(value.get("path"))


def _before_pattern(text: str) -> Path:
    parts = Path(text).expanduser().parts
    plain = next((place for place, part in enumerate(parts) if any(sign in part for sign in "*?[")), len(parts))
    return Path(*parts[:plain])
